"""Progress of long work: counted where it is done, shown by whoever listens.

`progress` opens a piece of work and yields the function that counts it. Nothing is counted unless
the caller listens (`showing`), as the command line does. After Ctrl-C the KeyboardInterrupt has a
note of what was interrupted and what is left of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

Advance = Callable[[float], object]
Item = TypeVar("Item")

AGAIN = "nothing was written; the same command starts again"
BAR_AFTER_S = 1.0
"""Work that takes less has no bar on a terminal."""
LINE_EVERY_S = 10.0
"""Time between lines where there is no terminal; work that takes less has none."""
_TICK_S = 0.1
_MEASURE_S = 1.0
_display: ContextVar[Display | None] = ContextVar("display", default=None)


class Screen(Protocol):
    """Where work is shown: a terminal, or lines elsewhere. See `instar.record.console`."""

    @property
    def due(self) -> bool:
        """Whether `update` should be called now."""

    @property
    def width(self) -> int | None:
        """Columns; None: there is no current line to update."""

    def show(self, text: str) -> None:
        """Print a line."""

    def update(self, text: str) -> None:
        """Replace the current line."""

    def close(self) -> None:
        """Restore the terminal."""


@dataclass(eq=False)
class Activity:
    """A piece of work. `n_done` and `total` are in `unit`, B for bytes; `remaining_text` says what an
    interruption leaves, and how to go on."""

    doing: str
    total: float | None
    unit: str
    remaining_text: str
    measure: Callable[[], float] | None
    n_done: float = 0.0
    began: float = field(default_factory=time.monotonic)
    _measured_at: float = float("-inf")
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def advance(self, amount: float) -> None:
        """Count; from any thread."""
        with self._lock:
            self.n_done += amount

    def line(self, width: int | None) -> str:
        from instar.record.format import progress_line

        now = time.monotonic()
        if self.measure is not None and now - self._measured_at >= _MEASURE_S:
            self._measured_at = now
            with suppress(OSError):  # files come and go
                self.n_done = self.measure()
        seconds = now - self.began
        return progress_line(self.doing, self.n_done, self.total, self.unit, seconds, width)

    @property
    def interruption_text(self) -> str:
        """What to say after an interruption."""
        return f"interrupted while {self.doing}: {self.remaining_text}"

    def note(self, error: KeyboardInterrupt) -> None:
        if not hasattr(error, "__notes__"):
            error.add_note(self.interruption_text)


@contextmanager
def progress(
    doing: str,
    total: float | None = None,
    unit: str = "B",
    *,
    remaining_text: str = AGAIN,
    measure: Callable[[], float] | None = None,
) -> Iterator[Advance]:
    """Show the block's work while it runs, and yield the function that counts what is done.

    Args:
        doing: what is done, e.g. "verifying step-2000".
        total: how much there is to do; None: unknown.
        unit: B for bytes, else a plural such as "documents".
        remaining_text: after Ctrl-C, what is left of the work and how to go on.
        measure: returns how much is done, if the block cannot count: a single call of a library.
    """
    display = _display.get()
    work = Activity(doing, total, unit, remaining_text, measure)
    try:
        if display is None:
            yield _ignore
        else:
            with display.showing(work):
                yield work.advance
    except KeyboardInterrupt as error:
        work.note(error)
        raise
    except GeneratorExit:  # an exception, or a break, leaves a loop over `track_items`
        if display is not None:
            display.unfinished_work = work
        raise


def track_items(
    items: Iterable[Item], doing: str, unit: str, total: float | None = None
) -> Iterator[Item]:
    """Yield the items, and count each when the next one is asked for; see `progress`."""
    with progress(doing, total, unit) as advance:
        for item in items:
            yield item
            advance(1)


def folder_bytes(folder: Path) -> float:
    """Return the size of all files in a folder: how much a library has written, see `measured`."""
    return float(sum(path.lstat().st_size for path in folder.rglob("*")))


class Display:
    """Shows the innermost work that takes long: a bar on a terminal, lines elsewhere."""

    def __init__(self, open_screen: Callable[[], Screen], *, owns: bool) -> None:
        """`owns`: close the screen after each work; it is opened when there is something to show."""
        self._open, self._owns = open_screen, owns
        self._screen: Screen | None = None
        self._works: list[Activity] = []
        self._ended = threading.Event()
        self._painter: threading.Thread | None = None
        self._told = 0.0
        self.unfinished_work: Activity | None = None
        """the loop that was left last, unless other work has begun since"""

    @property
    def current(self) -> Activity | None:
        """The innermost work."""
        return self._works[-1] if self._works else None

    @contextmanager
    def showing(self, work: Activity) -> Iterator[None]:
        self._works.append(work)
        self.unfinished_work = None
        if self._painter is None:
            self._ended.clear()
            self._told = work.began
            painter = threading.Thread(target=self._paint, daemon=True, name="progress")
            painter.start()
            self._painter = painter  # Ctrl-C before this leaves nothing to join
        try:
            yield
        finally:
            with suppress(ValueError):  # closed before
                self._works.remove(work)
            if not self._works:
                self.close()

    def close(self) -> None:
        """Show nothing more of any work."""
        self._works.clear()
        self._ended.set()
        if self._painter is not None:
            self._painter.join()
            self._painter = None
        if self._screen is not None:
            self._screen.update("")
            if self._owns:
                self._screen.close()
            self._screen = None

    def _paint(self) -> None:
        pause = BAR_AFTER_S
        while not self._ended.wait(pause):
            pause = _TICK_S
            now = time.monotonic()
            works = [work for work in self._works if now - work.began >= BAR_AFTER_S]
            work = works[-1] if works else None
            if work is None:
                continue
            if self._screen is None:
                self._screen = self._open()
            if self._screen.width is None:
                if now - self._told >= LINE_EVERY_S:
                    self._told = now
                    self._screen.show(work.line(None))
            elif self._screen.due:
                self._screen.update(work.line(self._screen.width))


@contextmanager
def showing(display: Display | None) -> Iterator[None]:
    """Show the work of the block on a display; None: not at all."""
    token = _display.set(display)
    try:
        yield
    except KeyboardInterrupt as error:
        if display is not None and (work := display.current or display.unfinished_work) is not None:
            work.note(error)
        raise
    finally:
        _display.reset(token)
        if display is not None:
            display.close()


def _ignore(_: float) -> None: ...
