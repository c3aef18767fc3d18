"""Settings in force at a step, and the learning rate they give.

Where a learning rate comes from: `optimizer.lr` in the config, changed only by operations in
the history (`schedule/operations.py`), turned into the number of one step by
`learning_rate` below, written into the optimizer by `run/step.py`, recorded by `run/trainer.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from instar.config.schema import RunConfig


@dataclass(frozen=True)
class Settings:
    """Every hyperparameter that an operation may change."""

    lr: float
    """peak learning rate; Muon's and other groups' rates keep their ratio to it"""
    lr_shape: Literal["cosine", "linear", "wsd", "step", "exponential", "constant"]
    warmup_iters: int
    lr_decay_iters: int | None
    """steps from `lr_start` to the end of the decay; None only when the shape has no end"""
    decay_fraction: float
    decay_every: int | None
    """steps after which the rate is multiplied by gamma; None only where the shape has none"""
    gamma: float
    min_lr_ratio: float
    lr_start: int
    """step at which the learning rate's course began; `reset_lr_schedule` moves it"""
    batch_size: int
    grad_accum: int
    eval_interval: int
    eval_iters: int | None
    """evaluation batches; None: the whole validation set"""
    context: int
    """tokens of a sample; at most what the architecture looks back on"""
    frozen: tuple[str, ...] = ()
    """parameter-name patterns, the last that matches decides: see `is_frozen`"""
    rewarm_start: int = 0
    """step at which the rate began to rise from 0 again, on top of its course"""
    rewarm_iters: int = 0
    """steps of that rise; 0: there is none"""

    @property
    def global_batch(self) -> int:
        """Samples one step consumes over all ranks."""
        return self.batch_size * self.grad_accum

    def counts(self) -> list[int]:
        """Whatever counts something, as far as it is given."""
        given = (self.lr_decay_iters, self.decay_every, self.eval_iters)
        counts = [self.warmup_iters, self.global_batch, self.eval_interval, self.context]
        return [*counts, *(count for count in given if count is not None)]


def initial_settings(config: RunConfig) -> Settings:
    """The settings of step 0, straight from the config."""
    course = config.learning_rate
    return Settings(
        lr=config.optimizer.lr,
        lr_shape=course.shape,
        warmup_iters=course.warmup_iters,
        lr_decay_iters=course.lr_decay_iters,
        decay_fraction=course.decay_fraction,
        decay_every=course.decay_every,
        gamma=course.gamma,
        min_lr_ratio=course.min_lr_ratio,
        lr_start=0,
        batch_size=config.train.batch_size,
        grad_accum=config.train.gradient_accumulation_steps,
        eval_interval=config.eval.eval_interval,
        eval_iters=config.eval.eval_iters,
        context=config.context,
    )


THAWED = "!"
"""before a pattern of `Settings.frozen`: what matches trains again"""


def is_frozen(patterns: Sequence[str], name: str) -> bool:
    """Whether a parameter is left out of training: the last pattern that matches its name says so."""
    for pattern in reversed(patterns):
        if fnmatchcase(name, pattern.removeprefix(THAWED)):
            return not pattern.startswith(THAWED)
    return False


def learning_rate(settings: Settings, step: int) -> float:
    """The learning rate of the update that step `step` (counted from 0) makes.

    The peak `lr` times a share. In the warm-up, of w = `warmup_iters` steps from `lr_start` on, the
    share of step n (from 0) is (n + 1) / w. Then, with m = `min_lr_ratio`, e = `lr_decay_iters`,
    and p = (n - w) / (e - w):

    - *cosine*: m + (1 - m) (1 + cos πp) / 2 (SGDR, arXiv 1608.03983, eq. 5, one cycle).
    - *linear*: 1 - (1 - m) p.
    - *wsd*: 1, and over the last `decay_fraction` of e steps linear from 1 to m (MiniCPM, arXiv
      2404.06395).
    - *step*: `gamma` to the power of the whole part of (n - w) / `decay_every`, m at least.
    - *exponential*: the same, but of (n - w) / `decay_every` as it is.
    - *constant*: 1.

    From step e on, the first three stay at m; the others know no e.

    A re-warming multiplies this by a factor that rises from 0 to 1 over `rewarm_iters` steps, while
    the course itself goes on (arXiv 2308.04014, which begins at 0 or the lowest rate; here 0).
    """
    done = step - settings.lr_start
    if done < settings.warmup_iters:
        share = (done + 1) / settings.warmup_iters
    else:
        share = _share_of_peak(settings, done)
    return settings.lr * share * _rewarmed(settings, step)


def _rewarmed(settings: Settings, step: int) -> float:
    done = step - settings.rewarm_start
    return (done + 1) / settings.rewarm_iters if 0 <= done < settings.rewarm_iters else 1.0


def _share_of_peak(settings: Settings, done: int) -> float:
    match settings.lr_shape:
        case "step" | "exponential":
            return _fallen(settings, done - settings.warmup_iters)
        case "cosine" | "linear" | "wsd":
            return _falling(settings, done)
    return 1.0


def _fallen(settings: Settings, done: int) -> float:
    """By gamma every so many steps, without an end."""
    every = settings.decay_every
    if every is None:
        return 1.0
    falls = done // every if settings.lr_shape == "step" else done / every
    return max(settings.min_lr_ratio, math.pow(settings.gamma, falls))


def _falling(settings: Settings, done: int) -> float:
    """To the lowest rate, which is met at the end."""
    if settings.lr_decay_iters is None:
        return 1.0
    end, lowest = settings.lr_decay_iters, settings.min_lr_ratio
    begin = settings.warmup_iters
    if settings.lr_shape == "wsd":
        begin = max(begin, end - round(settings.decay_fraction * end))
    if done >= end:
        return lowest
    if done < begin:
        return 1.0
    progress = (done - begin) / (end - begin)
    if settings.lr_shape == "cosine":
        return lowest + (1.0 - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - (1.0 - lowest) * progress
