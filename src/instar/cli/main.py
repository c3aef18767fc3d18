"""The command `instar`: a table of commands, each imported when it is called.

Exit codes: 0 done, 2 usage or config, 3 checkpoint invalid, 4 run failed, 75 stopped by a
signal and resumable, 130 interrupted, 141 whoever read the output went away.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import click

from instar import __version__
from instar.cli.lazy import LazyGroup
from instar.cli.plain import StdoutFails, speak_plainly, watch_stdout
from instar.config.errors import InstarError

COMMANDS = {
    "init": ("instar.cli.init:init", "Write a commented config to start from."),
    "train": ("instar.cli.train:train", "Train a model, on one process or many."),
    "resume": ("instar.cli.resume:resume", "Go on with a run that was stopped."),
    "test": ("instar.cli.test:test", "Test a run's best model on what was kept for it."),
    "control": ("instar.cli.control:control", "Ask a run under way to save or stop, or how it is."),
    "logs": ("instar.cli.logs:logs", "List, summarize, plot and compare runs, follow one."),
    "report": ("instar.cli.report:report", "Write one page that shows all of a run."),
    "dashboard": ("instar.cli.dashboard:dashboard", "Watch runs in a browser."),
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


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="A first run:  instar init gpt  then  instar train gpt.yaml",
)
@click.version_option(__version__, message="instar %(version)s")
def instar() -> None:
    """Training runs that grow while they train."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; errors become text on stderr."""
    speak_plainly()
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
        if isinstance(error, StdoutFails):
            _silence_stdout()
        click.echo(str(error), err=True)
        return error.exit_code
    except click.UsageError as error:
        from instar.cli.meant import explained

        explained(error).show()
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code


def entry() -> NoReturn:
    """The installed command. What it did is done: a late Ctrl-C has nothing left to stop."""
    watch_stdout()
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _run(args: list[str]) -> int:
    if instruction := os.environ.get("_INSTAR_COMPLETE"):
        from click.shell_completion import shell_complete

        return shell_complete(instar, {}, "instar", "_INSTAR_COMPLETE", instruction)
    try:
        click.Context.formatter_class = HelpFormatter
        with instar.make_context("instar", args, terminal_width=_help_width()) as context:
            result: Any = instar.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    return result if type(result) is int else 0


class HelpFormatter(click.HelpFormatter):
    """Gives names half of a narrow terminal at most, not 30 columns of any."""

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        super().write_dl(rows, min(col_max, self.width // 2), col_spacing)


def _help_width() -> int:
    """As many columns as there are, 78 at most; click by itself takes 50 for the least."""
    from shutil import get_terminal_size

    return min(get_terminal_size().columns, 80) - 2


def _silence_stdout() -> None:
    """Let the interpreter's own last flush of stdout go nowhere, without a word."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    entry()
