"""The command `instar`: a table of commands, each imported when it is called.

Exit codes: 0 done, 2 usage or config, 3 checkpoint invalid, 4 run failed, 75 stopped by a
signal and resumable, 130 interrupted, 141 whoever read the output went away.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from instar import __version__
from instar.config.errors import InstarError

COMMANDS = {
    "init": ("instar.cli.init:init", "Write a commented config to start from."),
    "train": ("instar.cli.train:train", "Train a model, on one process or many."),
    "resume": ("instar.cli.resume:resume", "Go on with a run that was stopped."),
    "test": ("instar.cli.test:test", "Test a run's best model on what was kept for it."),
    "control": ("instar.cli.control:control", "Ask a run under way to save or stop, or how it is."),
    "sample": ("instar.cli.sample:sample", "Let a trained model write."),
    "grow": ("instar.cli.grow:grow", "Make a larger model of a checkpoint, as a new run."),
    "checkpoint": (
        "instar.cli.checkpoint:checkpoint",
        "Look into checkpoints, check and carry them over.",
    ),
    "schedule": ("instar.cli.schedule:schedule", "Check schedules before a run."),
    "data": ("instar.cli.data:data", "Prepare and inspect training data."),
    "config": ("instar.cli.config:config", "Show, validate and compare configs."),
}

INTERRUPTED = 130
READER_GONE = 141


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, not when they are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002
        cmd_name: str,
    ) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"No such command '{args[0]}'.{_did_you_mean(args[0])}")
        return super().resolve_command(ctx, args)

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in COMMANDS.items()])


def _did_you_mean(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, COMMANDS, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="A first run:  instar init gpt  then  instar train gpt.yaml",
)
@click.version_option(__version__, message="instar %(version)s")
def instar() -> None:
    """Training runs that grow while they train."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; errors become text on stderr."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        _silence_stdout()
        return READER_GONE
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except InstarError as error:
        click.echo(str(error), err=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code


def entry() -> NoReturn:
    """The installed command. What it did is done: a late Ctrl-C has nothing left to stop."""
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _run(args: list[str]) -> int:
    if instruction := os.environ.get("_INSTAR_COMPLETE"):
        from click.shell_completion import shell_complete

        return shell_complete(instar, {}, "instar", "_INSTAR_COMPLETE", instruction)
    try:
        with instar.make_context("instar", args) as context:
            result: Any = instar.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    return result if type(result) is int else 0


def _silence_stdout() -> None:
    """Let the interpreter's own last flush of stdout go nowhere, without a word."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    entry()
