"""The instances of a fleet and their processes as frozen data, from which every display is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any

from instar.config.errors import printable_text
from instar.extensions.fleet.engines.remote import HostStatus
from instar.extensions.fleet.plan import Instance, text_of
from instar.extensions.fleet.spec import Scalar, Search
from instar.extensions.fleet.state import (
    DONE,
    ENDED,
    FleetStatus,
    InstanceStatus,
    ProcessStatus,
    as_json,
)


@dataclass(frozen=True)
class RunProgress:
    """How far a run has come; unknown values are None."""

    step: int | None
    loss: float | None
    """of the last training step that was recorded"""
    operations: int
    """number of scheduled operations so far"""
    ends_at: float | None
    """Unix seconds at which the first budget will be used up at the pace since the last start; None
    if the run has ended"""


@dataclass(frozen=True)
class ProcessRow:
    """A service or job of an instance."""

    name: str
    is_service: bool
    state: str
    """its phase, "exit STATUS", or "ended" if the launcher has died"""
    status: ProcessStatus


@dataclass(frozen=True)
class InstanceRow:
    """An instance; unknown texts are empty."""

    index: int
    run_name: str
    output_dir: str
    state: str
    """its phase; "stopped" if the launcher has died while it ran"""
    since: float
    """Unix seconds; 0: it has not started"""
    reason: str
    host: str
    """where it runs, if that is not the launcher's"""
    progress: RunProgress | None
    """of the run in its folder"""
    processes: tuple[ProcessRow, ...]
    trial: str = ""
    """of a search: what it has reached, and its values"""
    group: str = ""
    """the fleet's name and the values of the matrix, or of a search, other than seeds"""

    @property
    def restarts(self) -> int:
        """Number of times that one of its processes was started again."""
        return sum(max(0, process.status.attempt - 1) for process in self.processes)

    def eta_s(self, now: float) -> float | None:
        """Return the seconds until its run ends; None if that is unknown or it does not run."""
        if self.progress is None or self.progress.ends_at is None or self.state != "running":
            return None
        return max(0.0, self.progress.ends_at - now)


@dataclass(frozen=True)
class FleetView:
    """A fleet: also those of its instances that have not started."""

    name: str
    state: str
    """not started, running, launcher died, succeeded, failed or stopped"""
    launcher: int | None
    """process id, if it runs"""
    instances: tuple[InstanceRow, ...]
    best: BestTrial | None = None
    """of a search"""

    @property
    def best_lines(self) -> tuple[str, ...]:
        """The best trial, and which others cannot be compared with it; empty if there is none."""
        return (self.best.text, *self.best.notes) if self.best else ()

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of instances in each state."""
        return Counter(instance.state for instance in self.instances)

    @property
    def means(self) -> tuple[GroupMean, ...]:
        """Losses of the groups of instances that differ only in their seed, over at least two that have
        succeeded."""
        losses: dict[str, list[float]] = {}
        for instance in self.instances:
            if (
                instance.state == "succeeded"
                and instance.progress
                and instance.progress.loss is not None
            ):
                losses.setdefault(instance.group, []).append(instance.progress.loss)
        return tuple(
            GroupMean(group, len(group_losses), fmean(group_losses), stdev(group_losses))
            for group, group_losses in losses.items()
            if group and len(group_losses) > 1
        )


@dataclass(frozen=True)
class GroupMean:
    """The last loss of runs that differ only in the seed, or the fold."""

    group: str
    runs: int
    loss: float
    deviation: float
    """standard deviation over runs"""

    @property
    def text(self) -> str:
        return f"{self.group}: loss {self.loss:.4f} ±{self.deviation:.2g} over {self.runs} runs"


@dataclass(frozen=True)
class BestTrial:
    """The trial that has succeeded with the best value."""

    instance: int
    metric: str
    value: float
    values: Mapping[str, Scalar]
    notes: tuple[str, ...] = ()
    """which other trials cannot be compared with it"""

    @property
    def text(self) -> str:
        return f"best: trial {self.instance}, {_text(self.metric, self.value, self.values)}"


def best_trial(search: Search | None, status: FleetStatus) -> BestTrial | None:
    """Return the best trial; None if none has succeeded, or the fleet is no search."""
    if search is None:
        return None
    sign = 1 if search.direction == "minimize" else -1
    values = {
        index: instance.metric
        for index, instance in status.instances.items()
        if instance.phase == "succeeded" and instance.metric is not None
    }
    if not values:
        return None
    index = min(values, key=lambda index: (sign * values[index], index))
    return BestTrial(index, search.metric, values[index], status.instances[index].values)


def trial_text(search: Search | None, trial: InstanceStatus) -> str:
    """Return what a trial has reached, and its values; "" if it is none."""
    return "" if search is None else _text(search.metric, trial.metric, trial.values)


def _text(metric: str, value: float | None, values: Mapping[str, Scalar]) -> str:
    metric_values = {} if value is None else {metric: value}
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in {**metric_values, **values}.items()
    )


def fleet_view(
    name: str,
    status: FleetStatus,
    launcher: int | None,
    plan_instances: Iterable[Instance] = (),
    services: Collection[str] = (),
    progress: Mapping[int, RunProgress] | None = None,
    search: Search | None = None,
    hosts: Mapping[int, HostStatus] | None = None,
) -> FleetView:
    """Return what is shown of a fleet.

    Args:
        plan_instances: its instances, if its file can be read.
        services: names of its services.
        progress: of the runs, by instance.
        hosts: what SLURM knows of the hosts, by instance.
    """
    hosts = hosts or {}
    instances = {instance.index: instance for instance in plan_instances}
    rows = [
        _instance_row(
            index,
            status.instances.get(index, InstanceStatus()),
            instances.get(index),
            services,
            (progress or {}).get(index),
            search,
            hosts.get(index),
            is_live=launcher is not None,
        )
        for index in sorted(status.instances.keys() | instances.keys())
    ]
    best = best_trial(search, status)
    state = fleet_state(status, launcher)
    # the last launcher may have run a part only, and hosts go on without one
    if state == "succeeded" or (state == "launcher died" and hosts):
        states = {row.state for row in rows}
        state = "failed" if "failed" in states else "stopped"
        state = "succeeded" if states <= {*DONE} else state
    if any(host.alive for host in hosts.values()):
        state = "running"
    groups = {
        index: group_name(name, instance, status.instances.get(index))
        for index, instance in instances.items()
    }
    rows = [replace(row, group=groups.get(row.index, "")) for row in rows]
    return FleetView(name, state, launcher, tuple(rows), best)


def group_name(fleet: str, instance: Instance, status: InstanceStatus | None) -> str:
    """Return the fleet's name and the values of the matrix, or of a search, other than seeds and folds."""
    values = {**instance.values, **(status.values if status else {})}
    last = {key: key.rpartition(".")[2] for key in values}
    settings = [
        f"{last[key]}={text_of(value)}"
        for key, value in values.items()
        if last[key] not in ("seed", "fold")
    ]
    return printable_text(" ".join([fleet, *settings]))


def fleet_state(status: FleetStatus, launcher: int | None) -> str:
    """Return the state in which the last launcher left a fleet, given its process id if it runs."""
    if launcher is not None:
        return "running"
    if status.start is None:
        return "not started"
    if status.end is None:
        return "launcher died"
    return {0: "succeeded", 75: "stopped"}.get(status.end.code, "failed")


def fleet_json(view: FleetView, status: FleetStatus, now: float) -> dict[str, Any]:
    """Return a fleet as JSON-ready data: what was recorded, and what the record of each run adds."""
    data = as_json(status)
    blank = as_json(FleetStatus({0: InstanceStatus()}))["instances"]["0"]
    instances = {}
    for row in view.instances:
        run = row.progress or RunProgress(None, None, 0, None)
        instances[str(row.index)] = data["instances"].get(str(row.index), blank) | {
            "state": row.state,
            "run_name": row.run_name,
            "output_dir": row.output_dir,
            "restarts": row.restarts,
            "step": run.step,
            "loss": run.loss,
            "operations": run.operations,
            "eta_s": row.eta_s(now),
        }
    content = {"instances": instances, "state": view.state, "launcher": view.launcher}
    means = [asdict(mean) for mean in view.means]
    best = None if view.best is None else asdict(view.best)
    return data | content | {"best": best, "means": means}


def fleet_overview(view: FleetView) -> dict[str, Any]:
    """Return a fleet's row in the list of all fleets."""
    return {
        "fleet": view.name,
        "state": view.state,
        "instances": len(view.instances),
        "succeeded": view.counts["succeeded"],
        "failed": view.counts["failed"],
        "launcher": view.launcher,
    }


def _instance_row(
    index: int,
    status: InstanceStatus,
    plan_instance: Instance | None,
    services: Collection[str],
    progress: RunProgress | None,
    search: Search | None,
    host: HostStatus | None,
    *,
    is_live: bool,
) -> InstanceRow:
    # what an instance without a launcher was doing has ended with it
    state: str = status.phase if is_live or status.phase in ("waiting", *ENDED) else "stopped"
    reason = status.reason
    if host is not None and status.phase not in ("succeeded", "failed"):
        state, reason = _by_host(status, host), host.text
        is_live = host.alive and status.phase != "stopped"
    return InstanceRow(
        index,
        plan_instance.run_name if plan_instance else "",
        str(plan_instance.output_dir) if plan_instance else "",
        state,
        status.since,
        reason,
        status.host,
        progress,
        tuple(
            _process_row(name, process, name in services, is_live=is_live)
            for name, process in status.processes.items()
        ),
        trial_text(search, status),
    )


def _by_host(status: InstanceStatus, host: HostStatus) -> str:
    """Return the state of an instance whose host may have ended, or waits to run again."""
    if host.alive:
        return "waiting" if status.phase == "stopped" else status.phase
    return "stopped" if host.is_cancelled or status.phase == "stopped" else "failed"


def _process_row(
    name: str, status: ProcessStatus, is_service: bool, *, is_live: bool
) -> ProcessRow:
    state: str = status.phase if is_live else "ended"
    if status.phase == "exited":
        state = f"exit {status.status}"
    return ProcessRow(name, is_service, state, status)
