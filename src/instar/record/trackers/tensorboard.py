"""TensorBoard: one event file for each start of the run, written without TensorFlow or torch.

Its only axes are the step and the time; other axes are separate curves (`at/tokens`, …). A resumed
run begins its file with a session start, at which TensorBoard drops the points of later steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from instar.config.sections import TensorBoardConfig
from instar.record.events import Event
from instar.record.trackers.tracker import Outcome, TrackedRun, Tracker


class TensorBoard(Tracker):
    name = "tensorboard"

    def __init__(self, config: TensorBoardConfig) -> None:
        self._config = config
        self._file: Any = None

    def start(self, run: TrackedRun) -> None:
        from instar.record.trackers.event_file import EventFile

        parent = self._config.dir
        folder = Path(parent) / run.name if parent is not None else run.folder / "tensorboard"
        self.where = str(folder)
        self._file = EventFile(folder, run)

    def take(self, event: Event) -> None:
        self._file.take(event)

    def flush(self) -> None:
        self._file.flush()

    def finish(self, outcome: Outcome) -> None:
        self._file.finish(outcome)
