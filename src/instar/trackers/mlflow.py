"""MLflow: a folder by default, or whatever store its address names.

The folder is a store that MLflow keeps for old data and lets one use when told so
(`MLFLOW_ALLOW_FILE_STORE=true`, also for `mlflow ui`); `mlflow-skinny` has no other local one
without SQLAlchemy. Its axes are the step and the time; the others are metrics of their own
(`at/tokens`, …). A run that is resumed goes on as the same run. MLflow cannot take back a point, nor
change a parameter: after a rewind the superseded points stay, and a changed setting is a tag.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from instar.config.record import MlflowConfig
from instar.record.events import Event, Placed, RunFinished
from instar.record.metrics import metrics
from instar.trackers.reading import note, places, totals
from instar.trackers.tracker import Outcome, TrackedRun

URI = "MLFLOW_TRACKING_URI"

METRICS_AT_ONCE, PARAMETERS_AT_ONCE = 1000, 100
LONGEST_NAME, LONGEST_PARAMETER, LONGEST_TAG = 250, 6000, 8000
"""Limits of MLflow's."""

_STATUS: dict[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "crashed": "FAILED"}


class Mlflow:
    name = "mlflow"

    def __init__(self, config: MlflowConfig) -> None:
        self.where = ""
        self._config = config
        self._client: Any = None
        self._own = ""
        self._metrics: list[Any] = []

    def start(self, run: TrackedRun) -> None:
        uri = store_uri(self._config.uri, run.folder)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        if is_folder(uri):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        where = f"{uri} {self._config.experiment}"
        own = run.ids.get(self.name, where)
        if own is None:
            own = self._client.create_run(self._experiment(), run_name=run.name).info.run_id
            run.ids.keep(self.name, where, own)
        else:
            self._client.update_run(own, status="RUNNING")
        self._own = own
        self.where = f"{uri} run {own}"
        self._set(run)

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = self._config.experiment
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run made it in between
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _set(self, run: TrackedRun) -> None:
        """The config as parameters; one that stands otherwise already as a tag."""
        from mlflow.entities import Param

        there = self._client.get_run(self._own).data.params
        said = {_name(key): str(value)[:LONGEST_PARAMETER] for key, value in run.config.items()}
        new = [Param(key, value) for key, value in said.items() if key not in there]
        for start in range(0, len(new), PARAMETERS_AT_ONCE):
            self._client.log_batch(self._own, params=new[start : start + PARAMETERS_AT_ONCE])
        for key, value in said.items():
            if there.get(key, value) != value:
                self._tag(f"changed/{key}", value)
        self._tag("folder", str(run.folder))

    def take(self, event: Event) -> None:
        from mlflow.entities import Metric

        numbers: dict[str, float] = {}
        if isinstance(event, RunFinished):
            numbers = {f"final/{name}": value for name, value in totals(event).items()}
        elif measured := metrics(event):
            assert isinstance(event, Placed)
            numbers = measured | places(event)
        if isinstance(event, Placed):
            when = round(event.time * 1000)
            self._metrics += [
                Metric(_name(key), value, when, event.step) for key, value in numbers.items()
            ]
        if said := note(event):
            at = "" if said.kind == "checkpoint" else f" {said.step:09d}"  # the last one is enough
            self._tag(f"{said.kind}{at}", f"{said.title}: {said.text}")
        if len(self._metrics) >= METRICS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        points, self._metrics = self._metrics, []
        for start in range(0, len(points), METRICS_AT_ONCE):
            self._client.log_batch(self._own, metrics=points[start : start + METRICS_AT_ONCE])

    def finish(self, outcome: Outcome) -> None:
        self.flush()
        self._client.set_terminated(self._own, status=_STATUS[outcome])

    def _tag(self, key: str, text: str) -> None:
        self._client.set_tag(self._own, _name(key), text[:LONGEST_TAG])


def store_uri(chosen: str | None, folder: Path) -> str:
    """The address of the store, of a run in `folder`."""
    chosen = chosen or os.environ.get(URI) or str(folder.absolute().parent / "mlruns")
    return chosen if ":" in chosen else Path(chosen).absolute().as_uri()


def is_folder(uri: str) -> bool:
    return uri.startswith("file:")


def _name(text: str) -> str:
    """As MLflow allows names to be."""
    return re.sub(r"[^\w. /:-]", "_", text)[:LONGEST_NAME]
