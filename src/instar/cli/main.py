"""The command `instar`: a table of commands, each imported when it is called.

Exit codes: 0 success, 2 usage or config, 3 checkpoint invalid, 4 run failed, 75 stopped by a
signal and resumable, 130 interrupted with nothing to resume, 141 the reader of stdout has exited.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import click
from click.shell_completion import shell_complete

from instar import __version__
from instar.cli.completion import VARIABLE
from instar.cli.options import LazyGroup, Say, in_one_line, json_requested, say
from instar.config.errors import ConfigError, InstarError, sentence_of
from instar.config.files import check_words
from instar.config.user_code.trust import TRUST_VARIABLE, Untrusted
from instar.extensions import how_to_install, load_target, programs
from instar.logs.text.stdout import StdoutFails, set_encoding, watch_streams
from instar.processes.cores import share_cores
from instar.processes.interrupt import PromptInterrupt, ignore_stop_signals
from instar.record.progress import Display, Screen, showing

COMMANDS = {
    "init": ("instar.cli.config:init", "Write a commented config to start from."),
    "demo": (
        "instar.cli.config:demo",
        "Train and change a small GPT, and let it write.",
    ),
    "train": ("instar.cli.train:train", "Train a model, on one process or many."),
    "resume": ("instar.cli.train:resume", "Resume a run that was stopped."),
    "test": ("instar.cli.train:test", "Test a run's best checkpoint on the test split."),
    "control": ("instar.cli.train:control", "Tell a run to save or to stop, or print its status."),
    "logs": (
        "instar.cli.logs.commands:logs",
        "List, summarize, plot and compare runs, follow one.",
    ),
    "sample": ("instar.cli.train:sample", "Generate text with a trained model."),
    "grow": ("instar.cli.growth:grow", "Grow the model of a checkpoint into a new run."),
    "checkpoint": (
        "instar.cli.checkpoint:checkpoint",
        "List, inspect, verify, compare and convert checkpoints.",
    ),
    "schedule": ("instar.cli.growth:schedule", "Check schedules, and predict what they save."),
    "data": ("instar.cli.data:data", "Prepare and inspect training data."),
    "config": ("instar.cli.config:config", "Show, validate and compare configs."),
    "completion": (
        "instar.cli.completion:completion",
        "Print the script with which a shell completes commands.",
    ),
}

INTERRUPTED = 130
LEAVE_S = 5.0
"""how long the import of what ends an interrupted command may take"""
PATH_ERRORS = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EROFS,
}
"""Errors of invalid arguments; all other OS errors are failures of the machine."""
READER_GONE = 141
_RANKS = (
    *("gpu", "gpus", "num_gpus", "n_gpus", "ngpus", "ranks", "world_size"),
    *("num_processes", "nproc_per_node", "nprocs", "n_proc"),
)
"""Names of other launchers' options for the number of processes."""


def _open_screen() -> Screen:
    from instar.record.console import open_screen

    return open_screen(sys.stderr)


_display = Display(_open_screen, owns=True)


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    is_open=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="A first run:  instar demo, or  instar init gpt  then  instar train gpt.yaml",
)
@click.version_option(__version__, message="instar %(version)s")
def instar() -> None:
    """Training runs that are changed safely while they train."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; print errors on stderr."""
    args = list(sys.argv[1:] if argv is None else argv)
    if json_requested(args):
        return in_one_line(lambda say: run_command(lambda: _run_with_trust(args), say))
    return run_command(lambda: _run_with_trust(args))


def run_command(run: Callable[[], int], say: Say = say) -> int:
    """Run a command and return its exit code; `say` prints errors."""
    set_encoding()
    try:
        code = run()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        _silence_stdout()
        return READER_GONE
    except (KeyboardInterrupt, click.Abort) as error:
        with suppress(OSError):  # the terminal has closed
            for note in getattr(error, "__notes__", ()):
                say(note)
        return INTERRUPTED
    except InstarError as error:
        if isinstance(error, StdoutFails):
            _silence_stdout()
        with suppress(OSError):  # the terminal has closed
            say(str(error))
        return error.exit_code
    except OSError as error:
        say(sentence_of(error))
        return ConfigError.exit_code if error.errno in PATH_ERRORS else InstarError.exit_code
    except MemoryError as error:
        say(f"not enough memory: {error}" if str(error) else "not enough memory")
        return InstarError.exit_code
    except ValueError as error:
        if "null" not in str(error) or "embedded" not in str(error):
            raise
        say("a path or a value contains a NUL character")
        return ConfigError.exit_code
    except click.UsageError as error:
        error = with_suggestion(error)
        if error.ctx is not None:
            click.echo(error.ctx.get_usage(), err=True)
            click.echo(f"Try '{error.ctx.command_path} --help' for help.\n", err=True)
        say(f"Error: {error.format_message()}")
        return error.exit_code
    except click.ClickException as error:
        say(f"Error: {error.format_message()}")
        return error.exit_code


def run_program(module: str) -> NoReturn:
    """Run a program that an extension has under the name of a module, as `python -m` does, and exit.

    It does not share cores with ranks, and is interrupted as any Python program.
    """

    def run() -> int:
        target = programs().get(module)
        if target is None:
            remedy = how_to_install("programs", module)
            raise ConfigError.of("this program's extension is not installed", module, remedy)
        return int(load_target(target).main(standalone_mode=False) or 0)

    sys.exit(run_command(run))


def entry() -> NoReturn:
    """Entry point of the installed command."""
    share_cores(os.environ)
    watch_streams()
    with PromptInterrupt(_leave):
        code = main()
        if code == INTERRUPTED:
            _leave()  # the interpreter would wait for threads
        ignore_stop_signals()
    sys.exit(code)


def _leave() -> NoReturn:
    """End an interrupted command, also one that cannot end by itself in time: a library is at work in it."""
    # what is imported may have to come from the file system that the command waits for
    last_resort = threading.Timer(LEAVE_S, os._exit, [INTERRUPTED])
    last_resort.daemon = True
    with suppress(RuntimeError):  # no thread can be started
        last_resort.start()
    try:
        from instar.distributed.signals import exit_now  # both not for `instar --help`
        from instar.record.atomic import abandon

        last_resort.cancel()
        abandon()
        with suppress(OSError):
            if (work := _display.current) is not None:
                os.write(2, f"\n{work.interruption_text}\n".encode(errors="replace"))
        exit_now(INTERRUPTED)
    finally:
        os._exit(INTERRUPTED)


def _run_with_trust(args: list[str]) -> int:
    """Run a command; if it would run another user's code, ask for confirmation at the terminal."""
    check_words(args)
    try:
        return _run(args)
    except ConfigError as error:
        asks = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
        # ranks share their launcher's terminal, so they must not ask
        if not isinstance(error, Untrusted) or not asks or "RANK" in os.environ:
            raise
        click.echo(str(error), err=True)
        if not click.confirm("Run this code?", err=True):
            return error.exit_code
        os.environ[TRUST_VARIABLE] = "1"
        return _run(args)


def _run(args: list[str]) -> int:
    if instruction := os.environ.get(VARIABLE):
        return shell_complete(instar, {}, "instar", VARIABLE, instruction)
    try:
        click.Context.formatter_class = HelpFormatter
        with (
            instar.make_context("instar", args, terminal_width=_help_width()) as context,
            showing(_display),
        ):
            result: Any = instar.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    return result if type(result) is int else 0


class HelpFormatter(click.HelpFormatter):
    """Limits the column of names to half of a narrow terminal, instead of always 30 columns."""

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        super().write_dl(rows, min(col_max, self.width // 2), col_spacing)


def _help_width() -> int:
    """Return the terminal's width, at most 78 columns; click's own minimum is 50.

    As `shutil.get_terminal_size`, whose module brings those of archives.
    """
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else 0
    with suppress(OSError):  # stdout is no terminal
        width = width or os.get_terminal_size().columns
    return min(width or 80, 80) - 2


def _silence_stdout() -> None:
    """Discard the interpreter's last flush of stdout at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def with_suggestion(error: click.UsageError) -> click.UsageError:
    """Add a suggestion to the error if a key of the config was given as an option."""
    hint = ""
    params = error.ctx.command.params if error.ctx else []
    options = {name for parameter in params for name in parameter.opts}
    if isinstance(error, click.NoSuchOption):
        likely = [name for name in error.possibilities or () if name != "--help"]
        hint = _suggest_option(error.option_name, options)
        hint = hint or (f"did you mean '{likely[0]}'?" if likely else "")
    elif "--set" in options and (pair := re.search(r"\(([\w.]+=[^\s)]*)", error.message)):
        hint = f"write --set {pair[1]}"
    if not hint:
        return error
    end = "" if hint.endswith("?") else "."
    message = f"{error.message.removesuffix('.')}. {hint[:1].upper()}{hint[1:]}{end}"
    return click.UsageError(message, error.ctx)


def _suggest_option(option: str, options: Collection[str]) -> str:
    word = option.lstrip("-").replace("-", "_")
    if "--nproc" in options and word in _RANKS:
        return "write --nproc for the number of ranks, or --devices 0,1 for their GPUs"
    if word == "schedule" and "--op" in options:
        return "write each operation as --op NAME=VALUE"
    if "--set" not in options:
        return ""
    from instar.config.fields import LANGUAGE, root_of
    from instar.config.suggestions import suggest_key

    if option in ("--config", "--cfg") and "--config" not in options:
        return "give the config without an option: instar train CFG"
    if word == "schedule" and "--schedule" not in options and "--until" not in options:
        return "give the schedule's file without an option"
    key = suggest_key(root_of(LANGUAGE), word)
    if key == "train.until" and "--until" in options:
        return "write --until, e.g. --until 2000it or --until 3ep"
    return f"write --set {key}=VALUE" if key else ""


if __name__ == "__main__":
    entry()
