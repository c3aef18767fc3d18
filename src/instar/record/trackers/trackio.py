"""trackio: writes directly into its local database, without a server, space, thread or account.

`trackio.init` would query the Hugging Face hub, print, and monitor the machine, so the storage
class is used as trackio's own importers do. Each row has all axes (`at/tokens`, `at/flops`, …), any
of which a chart can use. A resumed run continues the same run. Rows cannot be removed: superseded
ones stay beside the new ones.
"""

from __future__ import annotations

import os
import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from instar.config.sections import TrackioConfig
from instar.record.events import Event, Placed, RunFinished
from instar.record.trackers.tracker import (
    Note,
    Outcome,
    TrackedRun,
    Tracker,
    event_note,
    metrics_of_event,
    totals,
)

DIR = "TRACKIO_DIR"
MAX_ROWS = 5000
"""rows collected before they are written"""


class Trackio(Tracker):
    name = "trackio"

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config
        self._storage: Any = None
        self._run_keys: dict[str, str] = {}
        self._settings: dict[str, Any] = {}
        self._rows: list[tuple[Event, int, dict[str, Any]]] = []
        self._notes: list[tuple[Event, Note]] = []
        self._last: Placed | None = None

    def start(self, run: TrackedRun) -> None:
        where = self._choose_folder()
        from trackio.sqlite_storage import SQLiteStorage

        self._storage = SQLiteStorage
        project = self._config.project
        self.where = f"{SQLiteStorage.get_project_db_path(project)} {run.name}"
        SQLiteStorage.validate_project_name(project)
        run_id = run.ids.get(self.name, where) or secrets.token_hex(16)
        self._run_keys = {"project": project, "run": run.name, "run_id": run_id}
        created_at = datetime.now(UTC).isoformat()
        self._settings = dict(run.config) | {"_Created": created_at, "_Group": None}
        run.ids.keep(self.name, where, run_id)

    def _choose_folder(self) -> str:
        """Set trackio's folder, which it reads when it is imported."""
        if (setting := self._config.dir) is not None:
            folder = Path(setting).absolute()
            if (
                trackio_utils := sys.modules.get("trackio.utils")
            ) and folder != trackio_utils.TRACKIO_DIR:
                raise RuntimeError(
                    f"trackio writes into {trackio_utils.TRACKIO_DIR} in this process"
                )
            os.environ[DIR] = str(folder)
        return f"{os.environ.get(DIR, '')}/{self._config.project}"

    def take(self, event: Event) -> None:
        if isinstance(event, Placed):
            self._last = event
            if numbers := metrics_of_event(event):
                self._rows.append((event, event.step, numbers))
        if text_note := event_note(event):
            self._notes.append((event, text_note))
        if isinstance(event, RunFinished):
            final_values = {f"final/{name}": value for name, value in totals(event).items()}
            self._rows.append((event, event.step, final_values))
        if len(self._rows) >= MAX_ROWS:
            self.flush()

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        notes, self._notes = self._notes, []
        if rows:
            self._storage.bulk_log(
                **self._run_keys,
                metrics_list=[values for _, _, values in rows],
                steps=[step for _, step, _ in rows],
                timestamps=[_when(event) for event, _, _ in rows],
                config=self._settings,
            )
        if notes:
            self._storage.bulk_alert(
                **self._run_keys,
                titles=[note.title for _, note in notes],
                texts=[note.text for _, note in notes],
                levels=[note.level for _, note in notes],
                steps=[note.step for _, note in notes],
                timestamps=[_when(event) for event, _ in notes],
            )

    def finish(self, outcome: Outcome) -> None:
        if self._last is not None:
            self._rows.append((self._last, self._last.step, {"final/outcome": outcome}))
        self.flush()


def _when(event: Event) -> str:
    return datetime.fromtimestamp(event.time, UTC).isoformat()
