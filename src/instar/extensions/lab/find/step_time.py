"""Time of a config's steps and evaluations, by a few of them in this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from instar.config.load import Loaded
from instar.distributed.world import join_group
from instar.extensions.lab.find.training import open_trainer, prepared_alone

_TIMED_S = 1.0
_FEWEST, _MOST = 4, 50
"""steps"""


@dataclass(frozen=True)
class StepTime:
    """Seconds on one device."""

    step: float
    evaluation: float


def step_time(loaded_config: Loaded, say: Callable[[str], None]) -> StepTime:
    """Train some steps of a config on one device and evaluate once; nothing is written but data that
    are prepared.

    Raises:
        ConfigError: the run could not start.
    """
    prepared_run = prepared_alone(loaded_config, say)
    with (
        join_group(loaded_config.config.parallel, loaded_config.config.device) as world,
        open_trainer(prepared_run, prepared_run.config, world) as trainer,
    ):
        for _ in range(2):  # the first ones also allocate, compile and choose kernels
            trainer.step()
        times: list[float] = []
        while len(times) < _FEWEST or (sum(times) < _TIMED_S and len(times) < _MOST):
            start = time.perf_counter()
            trainer.step()
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        trainer.evaluate()
        return StepTime(statistics.median(times), time.perf_counter() - start)
