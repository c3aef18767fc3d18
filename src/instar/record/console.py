"""Progress output of a run: a live line on a terminal, plain lines elsewhere.

Output goes to stderr. A closed stream, or one that cannot encode a character, never stops a run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from instar.config.errors import without_filter
from instar.distributed.signals import detach_closed_streams
from instar.record.events import Eval, OperationEvent, RunFinished, RunStarted, Train
from instar.record.format import (
    TOK,
    data_lines,
    encodable_as,
    eval_line,
    finished_line,
    header_line,
    operation_lines,
    train_line,
    unit_text,
)

if TYPE_CHECKING:
    from rich.text import Text

REPAINT_EVERY_S = 0.1
REPAINT_SHARE = 0.01
"""Largest fraction of the time spent on repainting: a slow terminal is repainted less often."""


class Console:
    """Prints progress and events of a run. Errors of the stream are never raised."""

    def __init__(self, screen: PlainScreen | LiveScreen) -> None:
        self.screen = screen
        self._unit = TOK

    @property
    def due(self) -> bool:
        """Whether `progress` would be shown now, so that the caller can skip computing it."""
        return self.screen.due

    def header(self, event: RunStarted, where: Path) -> None:
        self._unit = unit_text(event.unit)
        self.screen.show(header_line(event, where), "bold")
        for line in data_lines(event.splits, event.drawing):
            self.screen.show(line)

    def progress(self, event: Train, eta_s: float | None = None) -> None:
        """Show the current step in place, at most ten times per second."""
        if self.screen.due:
            self.screen.update(self._train_line(event, eta_s))

    def train(self, event: Train, eta_s: float | None = None) -> None:
        """Print a line for a step."""
        self.screen.show(self._train_line(event, eta_s))

    def _train_line(self, event: Train, eta_s: float | None) -> str:
        return train_line(event, eta_s=eta_s, width=self.screen.width, unit=self._unit)

    def show_eval(self, event: Eval) -> None:
        self.screen.show(eval_line(event, width=self.screen.width, unit=self._unit), "cyan")

    def show_operation(self, event: OperationEvent) -> None:
        for line in operation_lines(event):
            self.screen.show(line, "magenta")

    def say(self, text: str) -> None:
        self.screen.show(text)

    def warn(self, text: str) -> None:
        self.screen.show(f"warning: {text}", "yellow")

    def show_end(self, event: RunFinished, where: Path, stop_reason: str = "") -> None:
        """Print the summary; `stop_reason` is why it ended early."""
        self.screen.update("")
        self.screen.show(finished_line(event, where, stop_reason, self._unit), "bold")

    def close(self) -> None:
        """Restore the terminal; closing twice does nothing."""
        self.screen.close()


def open_console(
    stream: TextIO | None = None, environment: Mapping[str, str] | None = None
) -> Console:
    """Return the console of `stream` (default: stderr), live if it is a terminal with a cursor."""
    return Console(open_screen(stream or sys.stderr, environment))


def open_screen(
    stream: TextIO | None, environment: Mapping[str, str] | None = None
) -> PlainScreen | LiveScreen:
    """Return the screen of `stream`; None: Python has none if it was closed."""
    environment = os.environ if environment is None else environment
    if stream is None:
        return PlainScreen(None, "ascii")
    encoding = _encoding(stream, environment)
    if not _is_terminal(stream) or environment.get("TERM", "") in ("", "dumb", "unknown"):
        return PlainScreen(stream, encoding)
    return LiveScreen(stream, encoding, color=not environment.get("NO_COLOR"))


def silent_console() -> Console:
    """Return a console that prints nothing, for all ranks but 0."""
    return Console(PlainScreen(None, "ascii"))


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (OSError, ValueError):
        return False


def _encoding(stream: TextIO, environment: Mapping[str, str]) -> str:
    if environment.get("LC_ALL") in ("C", "POSIX"):
        return "ascii"  # Python writes UTF-8 even then, which such a terminal garbles
    return getattr(stream, "encoding", None) or "ascii"


class PlainScreen:
    """Prints lines to pipes, files and terminals without a cursor; nothing without a stream."""

    due = False
    width: int | None = None

    def __init__(self, stream: TextIO | None, encoding: str) -> None:
        self._stream = stream
        self._encoding = encoding

    def show(self, text: str, style: str = "") -> None:
        del style
        if self._stream is None:
            return
        try:
            self._stream.write(encodable_as(text, self._encoding) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            _redirect_to_null(self._stream)
            self._stream = None

    def update(self, text: str) -> None: ...
    def close(self) -> None: ...


class LiveScreen:
    """Shows the current line, or several, in place at the bottom of a terminal; other lines scroll
    above it.

    Repainting needs no thread, and at most `REPAINT_SHARE` of the time on average.
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
        from rich.text import Text

        self._make_text = Text
        self._stream = stream
        self._own_escapes = ExitStack()
        self._own_escapes.enter_context(without_filter(stream))
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
        self._broken = False
        self._block: Text | None = None
        self._next_paint = 0.0
        self._attempt(self._start)

    @property
    def due(self) -> bool:
        """Whether `update` should be called now."""
        return self._live.is_started and self._clock() >= self._next_paint

    @property
    def width(self) -> int | None:
        """Columns of the terminal."""
        return self._terminal.width

    @property
    def height(self) -> int:
        """Lines of the terminal."""
        return self._terminal.height

    def show(self, text: str, style: str = "") -> None:
        """Print a line above the current one, or above the block."""
        # a current line is older than the printed one
        line, below = self._line(text, style), self._block or self._line("", "")
        self._attempt(lambda: self._live.update(below))
        self._attempt(lambda: self._terminal.print(line, soft_wrap=True))

    def update(self, text: str) -> None:
        """Replace the current line."""
        line, start = self._line(text, "dim"), self._clock()
        self._attempt(lambda: self._live.update(line, refresh=True))
        end = self._clock()
        self._next_paint = max(start + REPAINT_EVERY_S, end + (end - start) / REPAINT_SHARE)

    def paint(self, lines: Iterable[tuple[str, str]]) -> None:
        """Replace the block of lines, each with its style; lines that are too long are cut."""
        block = self._make_text("\n", no_wrap=True, overflow="ellipsis").join(
            self._line(text, style) for text, style in lines
        )
        self._block = block
        self._attempt(lambda: self._live.update(block, refresh=True))

    def close(self) -> None:
        self._attempt(self._live.stop)
        self._own_escapes.close()

    def _start(self) -> None:
        self._live.start()
        self._terminal.show_cursor(True)  # Live hides it, and a killed run would not restore it

    def _line(self, text: str, style: str) -> Text:
        return self._make_text(encodable_as(text, self._encoding), style=style)

    def _attempt(self, paint: Callable[[], object]) -> None:
        if self._broken:
            return
        try:
            paint()
        except (OSError, ValueError):
            self._broken = True
            _redirect_to_null(self._stream)
            with suppress(OSError, ValueError):
                self._live.stop()  # restores sys.stderr


def _redirect_to_null(stream: TextIO) -> None:
    """Redirect a broken stream to the null device, so that flushing it at exit does not fail."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    detach_closed_streams()
