"""MLflow: a local folder by default, or any store with a URI.

The folder is MLflow's legacy file store, which it enables with `MLFLOW_ALLOW_FILE_STORE=true` (also
for `mlflow ui`); `mlflow-skinny` has no other local store without SQLAlchemy. Its axes are the step
and the time; other axes are separate metrics (`at/tokens`, …). A resumed run continues the same
run. MLflow can neither remove points nor change parameters: superseded points stay, and a changed
setting becomes a tag.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from instar.config.errors import redact_text
from instar.config.sections import MlflowConfig
from instar.record.events import Event, ImageEvent, Placed, RunFinished, TableEvent, to_words
from instar.record.media import read_image
from instar.record.trackers.tracker import (
    Outcome,
    TrackedRun,
    Tracker,
    event_note,
    media_key,
    metrics_of_event,
    totals,
)

URI = "MLFLOW_TRACKING_URI"

METRICS_PER_BATCH, PARAMETERS_PER_BATCH = 1000, 100
MAX_NAME, MAX_PARAMETER, MAX_TAG = 250, 6000, 8000
"""Limits of MLflow."""
RETRY_AFTER_S = 0.5

_STATUS: dict[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "crashed": "FAILED"}


class Mlflow(Tracker):
    name = "mlflow"

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._mlflow: Any = None
        self._client: Any = None
        self._run_id = ""
        self._folder = Path()
        self._metrics: list[Any] = []

    def start(self, run: TrackedRun) -> None:
        self._folder = run.folder
        uri = store_uri(self._config.uri, run.folder)
        self.secrets = (uri,) if urlsplit(uri).netloc else ()
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        if is_folder(uri):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow.tracking  # reads the environment

        self._mlflow = mlflow
        with _creating_alone(uri):
            try:
                self._open(run, uri)
            except Exception:
                if not is_folder(uri):
                    raise
                # `mlflow ui` or a notebook, which take no lock, were creating the same folder
                time.sleep(RETRY_AFTER_S)
                self._open(run, uri)
        self._set(run)

    def _open(self, run: TrackedRun, uri: str) -> None:
        self._client = self._mlflow.tracking.MlflowClient(tracking_uri=uri)
        where = f"{redact_text(uri)} {self._config.experiment}"
        run_id = run.ids.get(self.name, where)
        if run_id is None:
            run_id = self._client.create_run(self._experiment(), run_name=run.name).info.run_id
            run.ids.keep(self.name, where, run_id)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id
        self.where = f"{redact_text(uri)} run {run_id}"

    def _experiment(self) -> str:
        name = self._config.experiment
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except self._mlflow.exceptions.MlflowException:  # another run created it meanwhile
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _set(self, run: TrackedRun) -> None:
        """Log the config as parameters; one with another value already as a tag."""
        logged_params = self._client.get_run(self._run_id).data.params
        parameters = {_name(key): str(value)[:MAX_PARAMETER] for key, value in run.config.items()}
        new = [
            self._mlflow.entities.Param(key, value)
            for key, value in parameters.items()
            if key not in logged_params
        ]
        for start in range(0, len(new), PARAMETERS_PER_BATCH):
            self._client.log_batch(self._run_id, params=new[start : start + PARAMETERS_PER_BATCH])
        for key, value in parameters.items():
            if logged_params.get(key, value) != value:
                self._tag(f"changed/{key}", value)
        self._tag("folder", str(run.folder))

    def take(self, event: Event) -> None:
        if isinstance(event, Placed):
            numbers = metrics_of_event(event)
            if isinstance(event, RunFinished):
                numbers = {f"final/{name}": value for name, value in totals(event).items()}
            when = round(event.time * 1000)
            self._metrics += [
                self._mlflow.entities.Metric(_name(key), value, when, event.step)
                for key, value in numbers.items()
            ]
        if isinstance(event, ImageEvent) and read_image(self._folder, event.path) is not None:
            image = str(self._folder / event.path)
            self._client.log_artifact(self._run_id, image, media_key(event))
        if isinstance(event, TableEvent):
            columns = zip(*event.rows, strict=True) if event.rows else [()] * len(event.columns)
            table = dict(zip(event.columns, columns, strict=True))
            file = f"{media_key(event)}/{event.step:09d}.json"
            self._client.log_dict(self._run_id, to_words(table), file)
        if text_note := event_note(event):
            at = (
                "" if text_note.kind == "checkpoint" else f" {text_note.step:09d}"
            )  # only the last one is kept
            self._tag(f"{text_note.kind}{at}", f"{text_note.title}: {text_note.text}")
        if len(self._metrics) >= METRICS_PER_BATCH:
            self.flush()

    def flush(self) -> None:
        points, self._metrics = self._metrics, []
        for start in range(0, len(points), METRICS_PER_BATCH):
            self._client.log_batch(self._run_id, metrics=points[start : start + METRICS_PER_BATCH])

    def finish(self, outcome: Outcome) -> None:
        self.flush()
        self._client.set_terminated(self._run_id, status=_STATUS[outcome])

    def _tag(self, key: str, text: str) -> None:
        self._client.set_tag(self._run_id, _name(key), text[:MAX_TAG])


def store_uri(setting: str | None, folder: Path) -> str:
    """Return the URI of the store for a run in `folder`."""
    setting = setting or os.environ.get(URI) or str(folder.absolute().parent / "mlruns")
    return setting if ":" in setting else Path(setting).absolute().as_uri()


def is_folder(uri: str) -> bool:
    return uri.startswith("file:")


@contextmanager
def _creating_alone(uri: str) -> Iterator[None]:
    """Keep other runs from creating the same folder and experiment, which MLflow does unlocked.

    The folder's parent is locked: MLflow creates its default experiment only with a new folder.
    """
    if not is_folder(uri):
        yield
        return
    parent = Path(url2pathname(urlsplit(uri).path)).parent
    parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _name(text: str) -> str:
    """Return a name with the characters that MLflow allows."""
    return re.sub(r"[^\w. /:-]", "_", text)[:MAX_NAME]
