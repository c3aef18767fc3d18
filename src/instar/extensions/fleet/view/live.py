"""A fleet while it runs: a table in place on a terminal, elsewhere a line for each change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from instar.config.errors import ConfigError
from instar.extensions.fleet.state import ENDED
from instar.extensions.fleet.view.reader import FleetReader
from instar.extensions.fleet.view.rows import FleetView, InstanceRow
from instar.extensions.fleet.view.table import (
    HEADERS,
    OPTIONAL,
    RIGHT,
    instance_cells,
    process_cells,
    process_place,
    title,
    without_line_breaks,
)
from instar.logs.text.stdout import align_columns, columns_that_fit
from instar.record.console import LiveScreen, PlainScreen, open_screen
from instar.record.format import loss

REDRAW_S = 1.0
"""shortest time between two reads of a fleet"""
SHARE = 0.01
"""largest share of a core that showing a fleet may take"""
_LONGEST_PAUSE_S = 5.0
_STYLES = {
    "succeeded": "green",
    "failed": "red",
    "waiting": "dim",
    "stopped": "yellow",
    "pruned": "dim",
}
_AROUND = 3
"""lines of the terminal that are not for instances: the title, the headers and the cursor"""


def watch_fleet(reader: FleetReader, screen: PlainScreen | LiveScreen) -> FleetView:
    """Show a fleet until it has ended; return its last state."""
    previous: FleetView | None = None
    while True:
        began = time.thread_time()
        view = reader.read()
        show_fleet(view, previous, screen)
        previous = view
        if view.state != "running":
            return view
        time.sleep(redraw_pause_s(time.thread_time() - began))


@contextmanager
def shown_below(folder: Path, stream: TextIO | None) -> Iterator[Callable[[str], None]]:
    """Show a fleet that this process runs below its messages, if the stream is a terminal.

    Yields a function that prints a message.
    """
    screen = open_screen(stream)
    if isinstance(screen, PlainScreen):
        yield screen.show
        return
    over = threading.Event()

    def redraw() -> None:
        reader, pause = FleetReader(folder), 0.0
        while not over.wait(pause):
            began = time.thread_time()
            with suppress(ConfigError):
                view = reader.read()
                if reader.status.start is not None:
                    show_fleet(view, None, screen)
            pause = redraw_pause_s(time.thread_time() - began)

    thread = threading.Thread(target=redraw, daemon=True)
    thread.start()
    try:
        yield screen.show
    finally:
        over.set()
        thread.join()
        screen.close()


def redraw_pause_s(taken_s: float) -> float:
    """Return how long to wait after a redraw that took so much processor time."""
    return min(max(REDRAW_S, taken_s / SHARE), _LONGEST_PAUSE_S)


def show_fleet(view: FleetView, before: FleetView | None, screen: PlainScreen | LiveScreen) -> None:
    """Draw the table in place, or print what has changed since `before`."""
    if isinstance(screen, LiveScreen):
        screen.paint(block(view, time.time(), screen.width or 0, screen.height))
    else:
        for line in fleet_changes(before, view):
            screen.show(line)


def block(view: FleetView, now: float, width: int, height: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of a table that fits a terminal, each with its style.

    Instances that run come first if there is no room for all.
    """
    instances, hidden = _that_fit(view, height - _AROUND)
    rows: list[tuple[str, ...]] = [HEADERS]
    styles = ["bold"]
    for instance in instances:
        rows.append(instance_cells(instance, now))
        styles.append(_STYLES.get(instance.state, ""))
        if instance.state not in ENDED:
            rows += map(process_cells, instance.processes)
            styles += ["dim"] * len(instance.processes)
    columns = columns_that_fit(HEADERS, rows[1:], OPTIONAL, width)
    right = [
        columns.index(HEADERS.index(header)) for header in RIGHT if HEADERS.index(header) in columns
    ]
    yield title(view), "bold"
    lines = align_columns([[row[number] for number in columns] for row in rows], right)
    yield from zip(lines, styles, strict=True)
    if hidden:
        yield f"… {hidden:,} more", "dim"


def fleet_changes(before: FleetView | None, view: FleetView) -> Iterator[str]:
    """Yield a line for each instance and process whose state has changed."""
    rows_before = {row.index: row for row in before.instances} if before else {}
    if before is None or before.state != view.state:
        yield title(view)
    for instance in view.instances:
        was = rows_before.get(instance.index)
        name = instance.run_name or str(instance.index)
        starts = (
            {process.name: (process.state, process.attempt) for process in was.processes}
            if was
            else {}
        )
        for process in instance.processes:
            if starts.get(process.name) != (process.state, process.attempt):
                where = process_place(process)
                yield f"{name} {process.name}: {process.state}" + (where and f" ({where})")
        if was.state != instance.state if was else instance.state != "waiting":
            yield f"{name}: {instance.state}{_how_far(instance)}"


def _how_far(row: InstanceRow) -> str:
    run = row.progress
    parts = [
        "" if run is None or run.step is None else f"step {run.step:,}",
        "" if run is None or run.loss is None else f"loss {loss(run.loss)}",
        without_line_breaks(row.reason),
        without_line_breaks(row.trial),
    ]
    text = ", ".join(filter(None, parts))
    return f" ({text})" if text else ""


def _that_fit(view: FleetView, lines: int) -> tuple[list[InstanceRow], int]:
    """Return the instances that have room, and the number of the others."""
    rows: list[InstanceRow] = []
    every = sum(map(_lines, view.instances))
    room = lines if every <= lines else lines - 1
    for instance in sorted(view.instances, key=_rank):
        room -= _lines(instance)
        if room < 0:
            break
        rows.append(instance)
    return sorted(rows, key=lambda row: row.index), len(view.instances) - len(rows)


def _lines(row: InstanceRow) -> int:
    return 1 + (len(row.processes) if row.state not in ENDED else 0)


def _rank(row: InstanceRow) -> tuple[int, int]:
    """Running ones first, then failed ones, then others that have ended."""
    order = {"waiting": 3, "failed": 1}
    return order.get(row.state, 2 if row.state in ENDED else 0), row.index
