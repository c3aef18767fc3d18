"""A copy of a study in SQLite, for Optuna's own tools such as optuna-dashboard.

It is written and never read: each launcher makes it anew from the fleet's state. A thread writes it,
because Optuna takes tens of milliseconds for a trial.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.storages import RDBStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial

STUDY_FILE = "study.db"


class StudyFile:
    """The file; what cannot be written is reported once, and the search goes on without it."""

    def __init__(self, path: Path, study: Study, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._storage: RDBStorage | None = None
        self._ids: dict[int, int] = {}
        self._failed = False
        self._thread = ThreadPoolExecutor(1, "study")
        self._write(
            self._create, study.study_name, study.directions, study.get_trials(deepcopy=False)
        )

    def begun(self, trial: FrozenTrial) -> None:
        self._write(self._add, trial)

    def evaluated(self, number: int, evaluation: int, value: float) -> None:
        self._write(
            lambda: self._open.set_trial_intermediate_value(self._ids[number], evaluation, value)
        )

    def ended(self, trial: FrozenTrial) -> None:
        self._write(
            lambda: self._open.set_trial_state_values(
                self._ids[trial.number], trial.state, trial.values
            )
        )

    def close(self) -> None:
        """Wait until everything is written."""
        self._write(lambda: self._open.engine.dispose())
        self._thread.shutdown()

    @property
    def _open(self) -> RDBStorage:
        assert self._storage is not None
        return self._storage

    def _create(self, name: str, directions: Sequence[Any], trials: Sequence[FrozenTrial]) -> None:
        from optuna.storages import RDBStorage

        for path in (self._path, self._path.with_name(f"{self._path.name}-journal")):
            path.unlink(missing_ok=True)
        # a path of its own: that in a URL would be searched for braces and question marks
        connect = {"creator": lambda: sqlite3.connect(self._path)}
        self._storage = RDBStorage("sqlite://", engine_kwargs=connect)
        self._study = self._storage.create_new_study(directions, name)
        for trial in trials:
            self._add(trial)

    def _add(self, trial: FrozenTrial) -> None:
        self._ids[trial.number] = self._open.create_new_trial(self._study, trial)

    def _write(self, what: Callable[..., object], *values: object) -> None:
        def write() -> None:
            if self._failed:
                return
            try:
                what(*values)
            except Exception as error:  # a full disk, a file that somebody removed or locked
                self._failed = True
                self._say(f"{self._path} is not written: {error}; the search goes on without it")

        self._thread.submit(write)
