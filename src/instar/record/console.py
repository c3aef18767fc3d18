"""What a person sees of a run: a live line on a terminal, plain lines everywhere else.

Everything goes to stderr: progress is a message, not data. A stream that is gone, or that cannot
say a character, never stops a run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from instar.record.events import Eval, Operation, RunFinished, RunStarted, Saved, Train
from instar.record.lines import (
    TOK,
    eval_line,
    finished_lines,
    header_line,
    operation_lines,
    printable,
    saved_line,
    train_line,
    unit_text,
)

if TYPE_CHECKING:
    from rich.text import Text

REPAINT_EVERY_S = 0.1
REPAINT_SHARE = 0.01
"""Of the time, the most that repainting may take: a slow terminal is painted less often."""


class Screen(Protocol):
    """Where lines go."""

    @property
    def due(self) -> bool:
        """Whether `update` would paint now."""
        ...

    @property
    def width(self) -> int | None:
        """Columns; None where lines may have any length."""
        ...

    def show(self, text: str, style: str = "") -> None:
        """Show a line that stays."""
        ...

    def update(self, text: str) -> None:
        """Show the line that changes in place; nothing where there cannot be one."""
        ...

    def close(self) -> None: ...


class Console:
    """One run's voice. No method raises because of its stream."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._unit = TOK

    @property
    def due(self) -> bool:
        """Whether `progress` would be painted now: asking costs nothing, a loss may."""
        return self._screen.due

    def header(self, event: RunStarted, where: Path) -> None:
        self._unit = unit_text(event.unit)
        self._screen.show(header_line(event, where), "bold")

    def progress(self, event: Train, eta_s: float | None = None) -> None:
        """The current step, in place, at most ten times a second."""
        if self._screen.due:
            self._screen.update(
                train_line(event, eta_s=eta_s, width=self._screen.width, unit=self._unit)
            )

    def train(self, event: Train, eta_s: float | None = None) -> None:
        """A step whose line stays."""
        self._screen.show(train_line(event, eta_s=eta_s, width=self._screen.width, unit=self._unit))

    def evaluated(self, event: Eval) -> None:
        self._screen.show(eval_line(event, width=self._screen.width, unit=self._unit), "cyan")

    def operated(self, event: Operation) -> None:
        for line in operation_lines(event):
            self._screen.show(line, "magenta")

    def saved(self, event: Saved) -> None:
        self._screen.show(saved_line(event), "dim")

    def say(self, text: str) -> None:
        self._screen.show(text)

    def warn(self, text: str) -> None:
        self._screen.show(f"warning: {text}", "yellow")

    def finished(
        self, event: RunFinished, where: Path, *, stopped: str = "", go_on: str = ""
    ) -> None:
        """The summary; `stopped` says why it ended early, `go_on` is the command that resumes."""
        self._screen.update("")
        for line in finished_lines(event, where, stopped, go_on, self._unit):
            self._screen.show(line, "bold")

    def close(self) -> None:
        """Leave the terminal as it was; closing twice does nothing."""
        self._screen.close()


def open_console(
    stream: TextIO | None = None, environment: Mapping[str, str] | None = None
) -> Console:
    """The console on `stream` (stderr): live on a terminal that can move its cursor, else plain."""
    stream = stream or sys.stderr
    environment = os.environ if environment is None else environment
    if stream is None:  # Python's way of saying that there is no stderr
        return silent_console()
    encoding = _encoding(stream, environment)
    if not _is_terminal(stream) or environment.get("TERM", "") in ("", "dumb", "unknown"):
        return Console(PlainScreen(stream, encoding))
    return Console(LiveScreen(stream, encoding, color=not environment.get("NO_COLOR")))


def silent_console() -> Console:
    """For every rank but 0."""
    return Console(NoScreen())


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (OSError, ValueError):
        return False


def _encoding(stream: TextIO, environment: Mapping[str, str]) -> str:
    if environment.get("LC_ALL") in ("C", "POSIX"):
        return "ascii"  # Python itself speaks UTF-8 even then, which such a terminal garbles
    return getattr(stream, "encoding", None) or "ascii"


class NoScreen:
    due = False
    width = None

    def show(self, text: str, style: str = "") -> None: ...
    def update(self, text: str) -> None: ...
    def close(self) -> None: ...


class PlainScreen:
    """Lines and nothing else: for pipes, files and terminals without a cursor."""

    due = False
    width = None

    def __init__(self, stream: TextIO, encoding: str) -> None:
        self._stream: TextIO | None = stream
        self._encoding = encoding

    def show(self, text: str, style: str = "") -> None:
        del style
        if self._stream is None:
            return
        try:
            self._stream.write(printable(text, self._encoding) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            _let_go(self._stream)
            self._stream = None

    def update(self, text: str) -> None: ...
    def close(self) -> None: ...


class LiveScreen:
    """A terminal: the current line in place at the bottom, lines that stay scroll above it.

    Repainting takes no thread, and no more than `REPAINT_SHARE` of the time on average.
    """

    def __init__(
        self,
        stream: TextIO,
        encoding: str,
        *,
        color: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        self._stream = stream
        self._encoding = encoding
        self._clock = clock
        self._terminal = RichConsole(
            file=stream,
            force_terminal=True,
            no_color=not color,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._live = Live(
            console=self._terminal, auto_refresh=False, redirect_stdout=False, transient=True
        )
        self._gone = False
        self._next_paint = 0.0
        self._attempt(self._start)

    @property
    def due(self) -> bool:
        return self._live.is_started and self._clock() >= self._next_paint

    @property
    def width(self) -> int | None:
        return self._terminal.width

    def show(self, text: str, style: str = "") -> None:
        line, nothing = self._line(text, style), self._line("", "")
        # a line that stays is newer than the one in place
        self._attempt(lambda: self._live.update(nothing))
        self._attempt(lambda: self._terminal.print(line, soft_wrap=True))

    def update(self, text: str) -> None:
        line, start = self._line(text, "dim"), self._clock()
        self._attempt(lambda: self._live.update(line, refresh=True))
        end = self._clock()
        self._next_paint = max(start + REPAINT_EVERY_S, end + (end - start) / REPAINT_SHARE)

    def close(self) -> None:
        self._attempt(self._live.stop)

    def _start(self) -> None:
        self._live.start()
        self._terminal.show_cursor(True)  # Live hides it, and a killed run never brings it back

    def _line(self, text: str, style: str) -> Text:
        from rich.text import Text

        return Text(printable(text, self._encoding), style=style)

    def _attempt(self, paint: Callable[[], object]) -> None:
        if self._gone:
            return
        try:
            paint()
        except (OSError, ValueError):
            self._gone = True
            _let_go(self._stream)
            with suppress(OSError, ValueError):
                self._live.stop()  # gives sys.stderr back


def _let_go(stream: TextIO) -> None:
    """Point a stream whose reader is gone at nothing, lest Python fail when it flushes it at exit."""
    with suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
