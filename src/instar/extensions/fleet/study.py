"""The study of a search: Optuna draws values from finished trials and decides which to prune.

It lives in memory and is a fold over the fleet's events, so that it is the same after a kill. No file
of Optuna's is read; one is written.
"""

from __future__ import annotations

import math
import random
import sqlite3
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from instar.config.errors import ConfigError
from instar.extensions.fleet.spec import Dimension, Pruner, Scalar, Search
from instar.extensions.fleet.state import Phase

try:
    import optuna
except ImportError:
    raise ConfigError.of(
        "searches need optuna", where="search", hint="pip install 'instar[search]'"
    ) from None
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    NopPruner,
    SuccessiveHalvingPruner,
)
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

STUDY_FILE = "study.db"


@dataclass
class Trial:
    """One trial, and how it goes."""

    optuna_trial: optuna.Trial
    values: Mapping[str, Scalar]
    step: int = 0
    value: float = math.nan
    """of the last evaluation, at `step`"""
    evaluations: int = 0
    given_up: bool = False
    """the pruner has decided against it"""


class Study:
    """The trials of a search by the index of their instance.

    What is drawn for an instance depends on the seed, its index, and what is known by then.
    """

    def __init__(self, search: Search, name: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._search = search
        self._space = {key: _distribution(dimension) for key, dimension in search.space.items()}
        self.optuna = optuna.create_study(
            study_name=name,  # hyperband divides the trials by name and number
            direction=search.direction,
            sampler=RandomSampler(),
            pruner=_pruner(search.pruner),
        )
        self.trials: dict[int, Trial] = {}

    def ask(self, index: int, run: str, values: Mapping[str, Scalar] | None = None) -> Trial:
        """Begin a trial.

        Args:
            run: its name.
            values: those that were drawn for it before.
        """
        if values is None and self._search.sampler == "grid":
            values = self._combination(index)
        if values is not None:
            self.optuna.enqueue_trial(dict(values))
        self.optuna.sampler = self._sampler(index)
        trial = self.optuna.ask(self._space)
        trial.set_user_attr("run", run)
        self.trials[index] = Trial(trial, trial.params if values is None else values)
        return self.trials[index]

    def report(self, index: int, step: int, value: float) -> None:
        """Tell the pruner of an evaluation; `given_up` is its decision."""
        trial = self.trials[index]
        trial.step, trial.value = step, value
        trial.evaluations += 1
        trial.optuna_trial.report(value, trial.evaluations)
        trial.given_up = trial.given_up or trial.optuna_trial.should_prune()

    def tell(self, index: int, phase: Phase) -> None:
        """End a trial: what was learned from it counts for later ones."""
        trial = self.trials[index]
        if phase == "succeeded" and math.isfinite(trial.value):
            self.optuna.tell(trial.optuna_trial, trial.value)
        else:
            state = TrialState.PRUNED if phase == "pruned" else TrialState.FAIL
            self.optuna.tell(trial.optuna_trial, state=state)

    def frozen_trial(self, index: int) -> FrozenTrial:
        """Return a trial as Optuna has it now."""
        return self.optuna.get_trials(deepcopy=False)[self.trials[index].optuna_trial.number]

    def _sampler(self, index: int) -> BaseSampler:
        seed = int(np.random.SeedSequence([self._search.seed, index]).generate_state(1)[0])
        return TPESampler(seed=seed) if self._search.sampler == "tpe" else RandomSampler(seed)

    def _combination(self, index: int) -> dict[str, Scalar]:
        """Return one of all combinations, in random order: pruners compare with earlier ones."""
        count = self._search.combinations
        number = random.Random(self._search.seed).sample(range(count), self._search.count)[index]
        values: dict[str, Scalar] = {}
        for key, dimension in self._search.space.items():
            grid = dimension.grid()
            number, place = divmod(number, len(grid))
            values[key] = grid[place]
        return values


def _distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.choices is not None:
        return CategoricalDistribution(dimension.choices)
    low, high, step = dimension.low, dimension.high, dimension.step
    assert low is not None
    assert high is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the last step may end below `high`
        if dimension.is_integer:
            return IntDistribution(int(low), int(high), dimension.log, int(step or 1))
        return FloatDistribution(low, high, dimension.log, step)


def _pruner(pruner: Pruner) -> BasePruner:
    settings = pruner.settings
    if pruner.name == "hyperband":
        return HyperbandPruner(**settings)
    if pruner.name == "successive_halving":
        return SuccessiveHalvingPruner(**{"min_resource": 1, **settings})
    if pruner.name == "median":
        return MedianPruner(**settings)
    return NopPruner()


class StudyFile:
    """A copy of a study in SQLite, for Optuna's own tools such as optuna-dashboard.

    It is written and never read: each launcher makes it anew from the fleet's state. A thread writes it, because Optuna
    takes tens of milliseconds for a trial. What cannot be written is reported once, and the search goes on without it.
    """

    def __init__(self, path: Path, study: optuna.Study, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._storage: RDBStorage | None = None
        self._ids: dict[int, int] = {}
        self._failed = False
        self._thread = ThreadPoolExecutor(1, "study")
        self._write(
            self._create, study.study_name, study.directions, study.get_trials(deepcopy=False)
        )

    def add(self, trial: FrozenTrial) -> None:
        self._write(self._add, trial)

    def add_evaluation(self, number: int, evaluation: int, value: float) -> None:
        self._write(
            lambda: self._open.set_trial_intermediate_value(self._ids[number], evaluation, value)
        )

    def end(self, trial: FrozenTrial) -> None:
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
