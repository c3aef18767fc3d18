"""Runs on disk as values and tables: what `instar logs` prints."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from instar.api.curves import Plot, plot_records, watch_run
from instar.config.errors import ConfigError
from instar.logs.query.alignment import axis_named, parse_place
from instar.logs.query.compare import Comparison, compare_groups
from instar.logs.query.config import config_values
from instar.logs.query.groups import By, group_runs
from instar.logs.query.runs import find_runs, list_rows, row_to_json
from instar.logs.query.summary import summarize, summary_to_json
from instar.logs.read.columns import Column
from instar.logs.read.extract import rows_of
from instar.logs.read.record import AXES, RunRecord, Series, read_record
from instar.record.events import Event
from instar.record.rundir import runs_in

if TYPE_CHECKING:
    import pandas as pd


class Run:
    """A run as it was when it was loaded, also while it trains. `load_run` makes one."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        """events and faults too"""
        self.path = record.run.path
        self.id = record.run.id
        self.name = record.run.name

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)  # wherever a run's folder is taken

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all metrics, such as `loss`, `lr` and `val/loss`."""
        return self.record.metrics

    def metric(self, name: str) -> Series:
        """Return a metric by its name or an alias such as `val_loss`, without superseded points.

        `value`, `step`, `tokens`, `time` and the other axes of the result are arrays, [n].

        Raises:
            ConfigError: the run has no such metric; suggests one.
        """
        return self.record.series(name).current()

    def table(self, *metrics: str) -> dict[str, Column]:
        """Return equally long columns by name: step, tokens, … and the metrics; by default all.

        A row is a step at which something was measured; what was not measured there is NaN.

        Raises:
            ConfigError: the run has no such metric; suggests one.
        """
        return rows_of([self.metric(name) for name in metrics or self.metrics]).values

    def to_pandas(self, *metrics: str) -> pd.DataFrame:
        """Return `table` as a DataFrame.

        Raises:
            ConfigError: the run has no such metric, or pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ConfigError.of(
                "to_pandas needs the library `pandas`, which is not installed",
                hint="pip install pandas, or use table(), whose columns are arrays",
            ) from None
        return pandas.DataFrame(self.table(*metrics))

    def plot(
        self, *metrics: str, axis: str = "step", smooth: float = 0.0, log: bool = False
    ) -> Plot:
        """Return curves, which a notebook shows; see `instar.plot`."""
        return plot([self], metrics, axis=axis, smooth=smooth, log=log)

    def watch(self, *metrics: str) -> None:
        """Draw curves below a notebook's cell until the run has ended; an interrupt ends the drawing alone.

        Args:
            metrics: each in its own panel; default: the losses.

        Raises:
            ConfigError: this is no notebook, or matplotlib is not installed.
        """
        watch_run(self.record.run, metrics)

    def summary(self) -> dict[str, Any]:
        """Return what `instar logs summary --json` prints: state, best and last values, times, …"""
        return summary_to_json(summarize(self.record))

    def config(self) -> dict[str, Any]:
        """Return the values in force at the latest checkpoint by dotted key; secrets are redacted.

        Raises:
            ConfigError: the config cannot be read.
        """
        (config,), faults = config_values([self.record.run])
        if faults:
            raise ConfigError.of(faults[0])
        return config

    def checkpoints(self) -> list[Path]:
        """Return the folders of the checkpoints, oldest first."""
        from instar.checkpoint.listing import list_checkpoints  # brings psutil

        return list_checkpoints(self.path)

    def apply(
        self, name: str, value: Any = None, *, timeout_s: float = 120.0, **options: Any
    ) -> Mapping[str, Any]:
        """Ask this run, which must be running, for an operation; return the event that says what became of it.

        Args:
            options: the operation's, and the keys of a schedule's entry, e.g. `when={"at_step": 5000}`: then
                it waits for that trigger.
            timeout_s: longest wait for the run's answer, in seconds.

        Raises:
            ConfigError: no run of this config could carry it out.
            Refused: the run cannot carry it out now; it goes on unchanged.
            NotRunning: nothing trains in the run's folder, or it has not answered in time.
        """
        from instar.api.control import change_run  # brings the schema and the forecast

        entry = {"name": name, "value": value, **options}
        return event_values(change_run(self.record.run, entry, timeout_s).event)

    def cancel(
        self, *, id: str | None = None, entry: int | None = None, timeout_s: float = 120.0
    ) -> Mapping[str, Any]:
        """Ask this run to give up what waits: an operation by its request's id, or an entry of its schedule.

        Raises:
            Refused, NotRunning: see `apply`.
        """
        from instar.api.control import change_run

        if (id is None) == (entry is None):
            raise ConfigError.of("cancel takes id or entry, one of them")
        which = {"id": id} if id is not None else {"entry": entry}
        outcome = change_run(self.record.run, which, timeout_s, command="cancel")
        return event_values(outcome.event)

    def waiting(self) -> Mapping[str, Any]:
        """Return what waits: the rest of the `schedule`, and what was `asked` for, as the run wrote it last."""
        from instar.api.waiting import read_waiting

        values: dict[str, Any] = msgspec.to_builtins(read_waiting(self.record.run))
        return values


def event_values(event: Event) -> dict[str, Any]:
    """Return the fields of an event, with its kind."""
    values: dict[str, Any] = msgspec.to_builtins(event)
    return values


def load_run(
    run: str | os.PathLike[str] = "latest", folder: str | os.PathLike[str] = "runs"
) -> Run:
    """Load a run by its path, id or name, or the `latest`; the last one if several match.

    Args:
        folder: where ids and names are looked up.

    Raises:
        ConfigError: there is no such run; suggests one.
        RecordError: its record cannot be read.
    """
    return Run(read_record(find_runs([os.fspath(run)], Path(folder))[-1]))


def list_runs(
    folder: str | os.PathLike[str] = "runs",
    *,
    state: str | None = None,
    name: str | None = None,
    last: int | None = None,
) -> list[dict[str, Any]]:
    """Return what `instar logs list --json` prints of each run in a folder, the latest last.

    Args:
        state: only runs that are running, finished, stopped or crashed.
        name: only runs with this name, id or pattern.
        last: only so many.

    Raises:
        ConfigError: there is no such state.
    """
    rows = list_rows(runs_in(Path(folder)), state=state, name=name, last=last)
    return [row_to_json(row) for row in rows]


def compare(
    runs: Sequence[Run | str | os.PathLike[str]],
    metrics: Sequence[str] = (),
    *,
    at: Sequence[str] = (),
    axis: str = "step",
    at_loss: float | None = None,
    by: By = "run",
) -> Comparison:
    """Compare two or more runs at equal places, as `instar logs compare` does.

    Args:
        runs: what `load_run` returns, or what it takes: paths, ids or names.
        metrics: names or patterns, such as `val/*`; default: the losses.
        at: places such as "step=1000" or "tokens=1.5B"; default: five along `axis`.
        at_loss: also where each run first reaches this validation loss.
        by: "run": each by itself; "name": mean and deviation of runs of one name; "seed": of runs that differ only in
            the seed, or in the fold of a cross-validation.

    Raises:
        ConfigError: there is no such run, no run has such a metric, or a place cannot be parsed.
        RecordError: a record cannot be read.
    """
    records = _records(runs, "instar.compare")
    groups, _ = group_runs([record.run for record in records], by)
    return compare_groups(
        groups,
        records,
        metrics=metrics,
        places=[parse_place(place) for place in at],
        axis=axis_named(axis),
        target=at_loss,
    )


def plot(
    runs: Sequence[Run | str | os.PathLike[str]],
    metrics: Sequence[str] = (),
    *,
    axis: str = "step",
    smooth: float = 0.0,
    log: bool = False,
) -> Plot:
    """Draw the curves of runs, as `instar logs plot` does.

    Args:
        runs: what `load_run` returns, or what it takes: paths, ids or names.
        metrics: names, each in its own panel; default: the losses.
        axis: step, samples, tokens, epoch, flops, wall, active or time.
        smooth: weight of an exponential moving average, 0 to below 1.
        log: a logarithmic y axis.

    Returns:
        what a notebook shows as a picture, and `save` writes to a file.

    Raises:
        ConfigError: there is no such run or metric, or nothing to draw.
        RecordError: a record cannot be read.
    """
    records = _records(runs, "instar.plot")
    axis = axis_named(axis, AXES, "instar.plot")
    return plot_records(records, metrics, axis=axis, smooth=smooth, log=log)


def _records(runs: Sequence[Run | str | os.PathLike[str]], where: str) -> list[RunRecord]:
    if isinstance(runs, str | os.PathLike):
        raise ConfigError.of("runs must be a list of runs, or of their paths", where)
    return [(run if isinstance(run, Run) else load_run(run)).record for run in runs]
