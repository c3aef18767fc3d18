"""Settings in force at a step, and the learning rate they give.

Where a learning rate comes from: `optimizer.lr` in the config, changed only by operations in
the history (`schedule/operations.py`), turned into the number of one step by
`learning_rate` below, written into the optimizer by `run/step.py`, recorded by `run/trainer.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from instar.config.schema import RunConfig


@dataclass(frozen=True)
class Settings:
    """Every hyperparameter that an operation may change."""

    lr: float
    """peak learning rate; Muon's and other groups' rates keep their ratio to it"""
    lr_shape: Literal["cosine", "wsd", "constant"]
    warmup_iters: int
    lr_decay_iters: int | None
    """steps from `lr_start` to the end of the decay; None only when the shape is constant"""
    decay_fraction: float
    min_lr_ratio: float
    lr_start: int
    """step at which the learning rate's course began; `reset_lr_schedule` moves it"""
    batch_size: int
    grad_accum: int
    eval_interval: int
    eval_iters: int | None
    """evaluation batches; None: the whole validation set"""

    @property
    def global_batch(self) -> int:
        """Samples one step consumes over all ranks."""
        return self.batch_size * self.grad_accum


def initial_settings(config: RunConfig) -> Settings:
    """The settings of step 0, straight from the config."""
    course = config.learning_rate
    return Settings(
        lr=config.optimizer.lr,
        lr_shape=course.shape,
        warmup_iters=course.warmup_iters,
        lr_decay_iters=course.lr_decay_iters,
        decay_fraction=course.decay_fraction,
        min_lr_ratio=course.min_lr_ratio,
        lr_start=0,
        batch_size=config.train.batch_size,
        grad_accum=config.train.gradient_accumulation_steps,
        eval_interval=config.eval.eval_interval,
        eval_iters=config.eval.eval_iters,
    )


def learning_rate(settings: Settings, step: int) -> float:
    """The learning rate of the update that step `step` (counted from 0) makes.

    A linear warm-up over `warmup_iters` steps, then: *cosine* falls to
    `min_lr_ratio × lr` at `lr_decay_iters` (SGDR, arXiv 1608.03983, eq. 5, one cycle); *wsd* stays at
    the peak and falls linearly over the last `decay_fraction` of `lr_decay_iters`
    (MiniCPM, arXiv 2404.06395); *constant* stays. Past the end the rate stays at its lowest.
    """
    done = step - settings.lr_start
    if done < settings.warmup_iters:
        return settings.lr * (done + 1) / settings.warmup_iters
    return settings.lr * _share_of_peak(settings, done)


def _share_of_peak(settings: Settings, done: int) -> float:
    if settings.lr_shape == "constant" or settings.lr_decay_iters is None:
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
    if settings.lr_shape == "wsd":
        return 1.0 - (1.0 - lowest) * progress
    return lowest + (1.0 - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))
