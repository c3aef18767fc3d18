"""Everything that can be wrong with a run is found here, before anything is started.

What the config leaves open is derived from the data and written into it, so that from here on a
run is its config and its history alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from instar.config.checks import rank_checks
from instar.config.errors import ConfigError, Problem
from instar.config.load import Loaded
from instar.config.schema import RunConfig
from instar.record.rundir import check_run_dir
from instar.schedule.forecast import Forecast, checked_forecast
from instar.tasks.blueprint import Blueprint, kind_of
from instar.trackers.configured import missing


@dataclass(frozen=True)
class Prepared:
    """A run that may start."""

    config: RunConfig
    """with nothing left to derive"""
    blueprint: Blueprint
    forecast: Forecast
    derived: Mapping[str, object]
    """the config's dotted keys that were filled in"""


def prepare_data(loaded: Loaded, world_size: int, say: Callable[[str], None]) -> None:
    """Make the data set if it is not there; one process does this for all.

    Raises:
        ConfigError: it cannot be made, or was made otherwise than the config says.
    """
    config = loaded.config
    _check_place(loaded, world_size)
    kind_of(config.task).prepare(loaded, world_size, say)


def preflight(loaded: Loaded, world_size: int, *, new: bool = True) -> Prepared:
    """Check a config against the data, the machine and the number of ranks.

    The data set must be there (`prepare_data`). Neither torch nor a device is touched.

    Args:
        new: the run is to have a folder of its own; False when one goes on.

    Raises:
        ConfigError: all the mistakes found.
    """
    config = loaded.config
    problems: list[Problem] = []
    if new:
        with _collecting(problems):
            check_run_dir(config.record, config.name)
    blueprint: Blueprint | None = None
    with _collecting(problems):
        blueprint = kind_of(config.task).blueprint(loaded, world_size)
    if blueprint is None:
        raise ConfigError(*problems)
    if config.test.at_end:
        with _collecting(problems):
            blueprint.check_test()
    global_batch = config.train.batch_size * config.train.gradient_accumulation_steps
    if global_batch < world_size:
        problems.append(
            loaded.problem(
                "train.batch_size",
                f"a global batch of {global_batch} samples leaves some of {world_size} ranks "
                "without any at every step",
                f"make batch_size × gradient_accumulation_steps at least {world_size}",
            )
        )
    with _collecting(problems):
        _check_place(loaded, world_size)
    if problems:
        raise ConfigError(*problems)
    if not new:
        # what its schedule has come to is in its history, which is looked at when it goes on
        without = config.model_copy(update={"schedule": ()})
        loaded = dataclasses.replace(loaded, config=without)
    told = checked_forecast(loaded, blueprint, world_size)
    course = config.learning_rate
    if told.steps is None and course.lr_decay_iters is None and course.has_end:
        raise ConfigError(
            loaded.problem(
                "learning_rate.lr_decay_iters",
                f"learning_rate.lr_decay_iters is needed: a {course.shape} course must know its "
                "last step, and nobody knows how many samples this source has",
                "give it, or a budget such as 2000it",
            )
        )
    return _resolved(config, blueprint, told)


def _resolved(config: RunConfig, blueprint: Blueprint, told: Forecast) -> Prepared:
    derived = dict(blueprint.derived)
    if told.steps is not None:
        # a trial shorter than its warm-up still has a course
        derived["learning_rate.lr_decay_iters"] = max(
            told.steps, config.learning_rate.warmup_iters + 1
        )
    derived = {key: value for key, value in derived.items() if _value(config, key) is None}
    return Prepared(_with(config, derived), blueprint, told, derived)


def _check_place(loaded: Loaded, world_size: int) -> None:
    """Raises ConfigError for what so many ranks, or this machine, contradict."""
    clashes = [*rank_checks(loaded.config, world_size), *missing(loaded.config.record)]
    if clashes:
        raise ConfigError(
            *(loaded.problem(clash.keys[0], clash.message, clash.hint) for clash in clashes)
        )


def _value(config: RunConfig, key: str) -> object:
    section, _, field = key.partition(".")
    return getattr(getattr(config, section), field)


def _with(config: RunConfig, values: Mapping[str, object]) -> RunConfig:
    updates: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, field = key.partition(".")
        updates.setdefault(section, {})[field] = value
    sections: dict[str, BaseModel] = {
        name: getattr(config, name).model_copy(update=fields) for name, fields in updates.items()
    }
    return config.model_copy(update=sections)


@contextmanager
def _collecting(problems: list[Problem]) -> Iterator[None]:
    """Gathers the problems of a ConfigError raised inside, so that it does not hide the next."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems
