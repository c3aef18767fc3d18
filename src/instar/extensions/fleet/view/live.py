"""A fleet as text: its tables; and while it runs, a table in place on a terminal, elsewhere a line for each
change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from instar.config.errors import ConfigError
from instar.extensions.fleet.plan import FleetPlan, Instance
from instar.extensions.fleet.state import ENDED
from instar.extensions.fleet.view.reader import FleetReader
from instar.extensions.fleet.view.rows import FleetView, InstanceRow, ProcessRow
from instar.logs.text.stdout import align_columns, columns_that_fit
from instar.record.console import LiveScreen, PlainScreen, open_screen
from instar.record.format import duration, loss

HEADERS = ("#", "INSTANCE", "STATE", "STEP", "LOSS", "ETA", "OPS", "RESTARTS", "NOTE")
RIGHT = ("#", "STEP", "LOSS", "ETA", "OPS", "RESTARTS")
OPTIONAL = ("OPS", "RESTARTS", "ETA", "LOSS", "STEP")
"""columns that are left out on a narrow terminal, in this order"""
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
            {process.name: (process.state, process.status.attempt) for process in was.processes}
            if was
            else {}
        )
        for process in instance.processes:
            if starts.get(process.name) != (process.state, process.status.attempt):
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


def title(view: FleetView) -> str:
    """Return the fleet's name, state, and number of instances in each state."""
    counts = ", ".join(f"{count:,} {state}" for state, count in view.counts.items())
    return f"{view.name}: {view.state}" + (f" ({counts})" if len(view.counts) > 1 else "")


def fleet_table(view: FleetView, now: float) -> Iterator[tuple[str, ...]]:
    """Yield the rows of all instances, each followed by those of its processes."""
    for instance in view.instances:
        yield instance_cells(instance, now)
        yield from map(process_cells, instance.processes)


def instance_cells(row: InstanceRow, now: float) -> tuple[str, ...]:
    """Return the cells of an instance; `now`: Unix seconds."""
    run, eta_s = row.progress, row.eta_s(now)
    return (
        str(row.index),
        row.run_name,
        row.state,
        "" if run is None or run.step is None else f"{run.step:,}",
        "" if run is None or run.loss is None else loss(run.loss),
        "" if eta_s is None else duration(eta_s),
        str(run.operations) if run and run.operations else "",
        str(row.restarts or ""),
        without_line_breaks(", ".join(filter(None, [row.host, row.reason, row.trial]))),
    )


def process_cells(row: ProcessRow) -> tuple[str, ...]:
    """Return the cells of a process: where it runs, and why it does not."""
    return ("", f"  {row.name}", row.state, "", "", "", "", "", process_place(row))


def process_place(row: ProcessRow) -> str:
    """Return a process's GPUs, ports, attempt and reason, as far as there is something to say."""
    status = row.status
    parts = [f"GPU {','.join(map(str, status.gpus))}"] if status.gpus else []
    parts += [f"{name} {number}" for name, number in status.ports.items()]
    parts += [f"attempt {status.attempt}"] if status.attempt > 1 else []
    return without_line_breaks(", ".join([*parts, *filter(None, [status.reason])]))


def without_line_breaks(text: str) -> str:
    """Return a text without line breaks."""
    return " ".join(text.split())


def plan_row(plan: FleetPlan, instance: Instance) -> dict[str, Any]:
    """Return an instance's values, and the GPUs and ports that it would get."""
    row: dict[str, Any] = {"instance": instance.index, **instance.values}
    if plan.spec.engine == "local":
        slot = plan.slot(instance.index % plan.parallel)
        for name, gpus in slot.gpus.items():
            if gpus:
                row[f"{name} gpu"] = gpus[0] if len(gpus) == 1 else list(gpus)
        for name, ports in slot.ports.items():
            for port, number in ports.items():
                row[f"{name} {port}"] = number
    else:  # its host chooses them
        for name, process in plan.spec.processes.items():
            if process.resources.gpus:
                row[f"{name} gpus"] = process.resources.gpus
            if process.resources.nodes > 1:
                row[f"{name} nodes"] = process.resources.nodes
    return row | {"run_name": instance.run_name, "output_dir": str(instance.output_dir)}


def cell(value: Any) -> str:
    """Return a value of a row as text."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "–" if value is None else str(value)
