"""The tables of a fleet: texts of their cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from instar.extensions.fleet.plan import FleetPlan, Instance
from instar.extensions.fleet.view.rows import FleetView, InstanceRow, ProcessRow
from instar.record.format import duration, loss

HEADERS = ("#", "INSTANCE", "STATE", "STEP", "LOSS", "ETA", "OPS", "RESTARTS", "NOTE")
RIGHT = ("#", "STEP", "LOSS", "ETA", "OPS", "RESTARTS")
OPTIONAL = ("OPS", "RESTARTS", "ETA", "LOSS", "STEP")
"""columns that are left out on a narrow terminal, in this order"""


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
    parts = [f"GPU {','.join(map(str, row.gpus))}"] if row.gpus else []
    parts += [f"{name} {number}" for name, number in row.ports.items()]
    parts += [f"attempt {row.attempt}"] if row.attempt > 1 else []
    return without_line_breaks(", ".join([*parts, *filter(None, [row.reason])]))


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
