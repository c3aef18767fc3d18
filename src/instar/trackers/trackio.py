"""trackio, straight into its database on this machine: no server, no space, no thread, no account.

`trackio.init` would ask the Hugging Face hub who one is, print, and watch the machine, so its
storage is used as its own importers use it. Any axis can be chosen for a chart: each row has
`at/tokens`, `at/flops`, … A run that is resumed goes on as the same run. Its rows cannot be taken
back: after a rewind the superseded ones stay beside the new ones.
"""

from __future__ import annotations

import os
import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from instar.config.record import TrackioConfig
from instar.record.events import Event, Placed, RunFinished
from instar.record.metrics import metrics
from instar.trackers.reading import Note, note, places, totals
from instar.trackers.tracker import Outcome, TrackedRun

DIR = "TRACKIO_DIR"
MOST_ROWS = 5000
"""that are gathered before they are written"""


class Trackio:
    name = "trackio"

    def __init__(self, config: TrackioConfig) -> None:
        self.where = ""
        self._config = config
        self._storage: Any = None
        self._who: dict[str, str] = {}
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
        own = run.ids.get(self.name, where) or secrets.token_hex(16)
        self._who = {"project": project, "run": run.name, "run_id": own}
        created = datetime.now(UTC).isoformat()
        self._settings = dict(run.config) | {"_Created": created, "_Group": None}
        run.ids.keep(self.name, where, own)

    def _choose_folder(self) -> str:
        """Point trackio at its folder, which it looks up when it is imported."""
        if (chosen := self._config.dir) is not None:
            folder = Path(chosen).absolute()
            if (there := sys.modules.get("trackio.utils")) and folder != there.TRACKIO_DIR:
                raise RuntimeError(f"trackio writes into {there.TRACKIO_DIR} in this process")
            os.environ[DIR] = str(folder)
        return f"{os.environ.get(DIR, '')}/{self._config.project}"

    def take(self, event: Event) -> None:
        numbers = metrics(event)
        if isinstance(event, Placed):
            self._last = event
        if numbers and isinstance(event, Placed):
            self._rows.append((event, event.step, numbers | places(event)))
        if said := note(event):
            self._notes.append((event, said))
        if isinstance(event, RunFinished):
            found = {f"final/{name}": value for name, value in totals(event).items()}
            self._rows.append((event, event.step, found))
        if len(self._rows) >= MOST_ROWS:
            self.flush()

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        notes, self._notes = self._notes, []
        if rows:
            self._storage.bulk_log(
                **self._who,
                metrics_list=[values for _, _, values in rows],
                steps=[step for _, step, _ in rows],
                timestamps=[_when(event) for event, _, _ in rows],
                config=self._settings,
            )
        if notes:
            self._storage.bulk_alert(
                **self._who,
                titles=[said.title for _, said in notes],
                texts=[said.text for _, said in notes],
                levels=[said.level for _, said in notes],
                steps=[said.step for _, said in notes],
                timestamps=[_when(event) for event, _ in notes],
            )

    def finish(self, outcome: Outcome) -> None:
        if self._last is not None:
            self._rows.append((self._last, self._last.step, {"final/outcome": outcome}))
        self.flush()


def _when(event: Event) -> str:
    return datetime.fromtimestamp(event.time, UTC).isoformat()
