"""Finds the largest micro-batch that fits in memory, and the fastest, by trying some steps of each."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.config.schema import RunConfig
from instar.distributed.world import World, join_group
from instar.extensions.lab.find.training import open_trainer, prepared_alone
from instar.record.system import peak_bytes, usable_bytes
from instar.run.start.preflight import Prepared

MARGIN = 0.9
"""Share of the memory that a step may use."""
_AS_FAST = 0.97
"""Share of the highest speed above which a smaller micro-batch is preferred."""
_SATURATED = 1.02
"""A doubling that is not faster by this factor does not pay."""
_TIMED_S = 1.0
_MOST_STEPS = 20
_BISECTIONS = 3


@dataclass(frozen=True)
class BatchTried:
    """Some steps with one micro-batch each."""

    batch_size: int
    per_s: float
    """units of weight, e.g. tokens, per second; 0 if it does not fit"""
    memory_bytes: int
    """peak memory: allocated on the GPU, or resident on a CPU"""
    fits: bool = True


@dataclass(frozen=True)
class BatchFound:
    """Micro-batches that were tried, and what to set."""

    tried: tuple[BatchTried, ...]
    """in ascending order"""
    unit: str
    largest: int
    """largest that fits"""
    measured: bool
    """whether `largest` was tried; False: extrapolated from the memory of those that were"""
    fastest: int
    """smallest that is nearly as fast as any"""
    limit_bytes: int
    settings: dict[str, int]
    """values for the config that keep the global batch, by dotted key"""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)


def find_batch_size(
    loaded_config: Loaded,
    max_size: int | None = None,
    *,
    say: Callable[[str], None] = lambda _: None,
    on_try: Callable[[BatchTried], None] = lambda _: None,
) -> BatchFound:
    """Try micro-batches of 1, 2, 4 … samples on one device; nothing is written.

    On a GPU until one does not fit, then between the last two. On a CPU until the next one would
    need more memory than is available, by extrapolation, or until the speed no longer rises.

    Args:
        max_size: largest micro-batch to try; default: the samples of an epoch.

    Raises:
        ConfigError: the run could not start, or a single sample does not fit.
    """
    prepared_run = prepared_alone(loaded_config, say)
    config = prepared_run.config
    samples = prepared_run.spec.samples(config.context)
    largest_size = min(size for size in (max_size, samples, 2**20) if size is not None)
    with join_group(config.parallel, config.device) as world:
        limit = int(MARGIN * usable_bytes(str(world.device)))
        trials: dict[int, BatchTried] = {}

        def fits(size: int) -> bool:
            trials[size] = _try(prepared_run, world, size, limit)
            on_try(trials[size])
            return trials[size].fits

        if world.device.type == "cuda":
            largest = largest_by_trial(fits, largest_size)
        else:
            largest = largest_by_forecast(fits, trials, largest_size, limit)
    if not largest:
        hint = "make the model or its context smaller, or set train.gradient_checkpointing: true"
        raise ConfigError.of("a micro-batch of one sample does not fit in memory", "model", hint)
    fastest = fastest_of(list(trials.values()))
    return BatchFound(
        tuple(trials[size] for size in sorted(trials)),
        prepared_run.spec.unit,
        largest,
        largest in trials,
        fastest,
        limit,
        _settings(config, fastest),
    )


def largest_by_trial(fits: Callable[[int], bool], upper: int) -> int:
    """Return the largest size that fits, to about an eighth; 0: none."""
    works, fails = 0, None
    for size in _doublings(upper):
        if not fits(size):
            fails = size
            break
        works = size
    for _ in range(_BISECTIONS):
        if fails is None or fails - works < 2:
            break
        middle = (works + fails) // 2
        if fits(middle):
            works = middle
        else:
            fails = middle
    return works


def largest_by_forecast(
    fits: Callable[[int], bool], trials: dict[int, BatchTried], upper: int, limit: int
) -> int:
    """Return the largest size that is expected to fit, without using up the memory; 0: none."""
    largest, slower = 0, 0
    for size in _doublings(upper):
        if largest and _largest_within(list(trials.values()), limit, upper) < size:
            break
        if not fits(size):
            return largest
        if largest:
            slower = slower + 1 if trials[size].per_s < _SATURATED * trials[largest].per_s else 0
        largest = size
        if slower == 2:
            break
    return max(largest, _largest_within(list(trials.values()), limit, upper)) if largest else 0


def _largest_within(trials: Sequence[BatchTried], limit: int, upper: int) -> int:
    """Extrapolate the memory of the two largest sizes linearly; return the size that reaches the
    limit, at most `upper`."""
    if len(trials) < 2:
        return upper
    low, high = sorted(trials, key=lambda trial: trial.batch_size)[-2:]
    per_sample = (high.memory_bytes - low.memory_bytes) / (high.batch_size - low.batch_size)
    if per_sample <= 0:
        return upper
    return min(upper, math.floor(high.batch_size + (limit - high.memory_bytes) / per_sample))


def _doublings(upper: int) -> Iterator[int]:
    size = 1
    while size < upper:
        yield size
        size *= 2
    yield upper


def fastest_of(trials: Sequence[BatchTried]) -> int:
    """Return the smallest size that is nearly as fast as any."""
    highest = max(trial.per_s for trial in trials)
    return min(trial.batch_size for trial in trials if trial.per_s >= _AS_FAST * highest)


def _settings(config: RunConfig, fastest: int) -> dict[str, int]:
    """Return the largest divisor of the global batch that is at most the fastest size."""
    total = config.train.batch_size * config.train.gradient_accumulation_steps
    size = max(n for n in range(1, min(fastest, total) + 1) if total % n == 0)
    return {"train.batch_size": size, "train.gradient_accumulation_steps": total // size}


def _try(prepared_run: Prepared, world: World, size: int, limit: int) -> BatchTried:
    """Train a few steps with one micro-batch of `size` samples each."""
    train = prepared_run.config.train.model_copy(
        update={"batch_size": size, "gradient_accumulation_steps": 1}
    )
    config = prepared_run.config.model_copy(update={"train": train})
    try:
        gc.collect()
        peak_bytes(str(world.device), reset=True)
        with open_trainer(prepared_run, config, world) as trainer:
            for _ in range(2):  # the first ones also allocate, compile and choose kernels
                trainer.step()
            start, before = time.perf_counter(), trainer.state.progress
            while True:
                trainer.step()
                seconds = time.perf_counter() - start
                steps = trainer.state.step - before.step
                if seconds > _TIMED_S or steps == _MOST_STEPS:
                    break
            weight = trainer.state.progress.tokens - before.tokens
            memory = peak_bytes(str(world.device))
        return BatchTried(size, weight / seconds, memory, fits=memory <= limit)
    except torch.OutOfMemoryError:
        return BatchTried(size, 0.0, limit, fits=False)
    finally:
        if world.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
