"""Looks at the weights beside training, on a copy, in a thread of rank 0."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from instar.growth.analysis import Analysis, analyze
from instar.models.gpt import GPT
from instar.run.background import in_background
from instar.run.progress import Progress
from instar.run.state import copy_tensors
from instar.run.step import enter, to_device

if TYPE_CHECKING:
    from instar.run.trainer import Trainer

SAMPLES = 4
"""held-out samples that heads attend over"""
LAST_WAIT_S = 60.0


@dataclass(frozen=True)
class Finding:
    """An analysis, and of when."""

    progress: Progress
    analysis: Analysis
    seconds: float


class Analyst:
    """One analysis at a time; one that is due while another still runs is left out."""

    def __init__(self, every: int | None) -> None:
        """`every`: steps between analyses; None: there are none."""
        self.every = every
        self.pending: Future[Finding] | None = None
        self.before: tuple[int, Mapping[str, torch.Tensor]] | None = None

    def look_if_due(self, trainer: Trainer) -> None:
        """Begin an analysis after every so many steps, and tell of one that is over."""
        if self.every is None:
            return
        if self.pending is not None and self.pending.done():
            self.tell(trainer)
        step = trainer.progress.step
        due = step > 0 and step % self.every == 0 and (self.before is None or self.before[0] < step)
        if due and self.pending is None:
            model = trainer.task.shell()
            if not isinstance(model, GPT):
                return
            copy_tensors(
                dict(model.named_parameters()),
                {name: p.detach() for name, p in trainer.stepper.parameters.items()},
            )
            enter(model, step)
            indices = np.arange(min(SAMPLES, len(trainer.validation)))
            tokens_BT = to_device(trainer.validation.read(indices), torch.device("cpu"))["inputs"]
            progress, before = trainer.progress, self.before
            self.before = step, {name: p.detach() for name, p in model.named_parameters()}
            self.pending = in_background(
                lambda: _look(model.eval(), tokens_BT, progress, before), "instar-analyst"
            )

    def tell(self, trainer: Trainer) -> None:
        """Record the analysis under way; wait for it if need be."""
        pending, self.pending = self.pending, None
        if pending is None or not wait([pending], LAST_WAIT_S).done:
            return
        try:
            trainer.narrator.analyzed(pending.result())
        except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
            # a run does not end because somebody looked at it
            trainer.narrator.warn(f"the analysis failed: {error}", trainer.progress.step)


def _look(
    model: GPT,
    tokens_BT: torch.Tensor,
    progress: Progress,
    before: tuple[int, Mapping[str, torch.Tensor]] | None,
) -> Finding:
    begun = time.monotonic()
    found = analyze(
        model,
        tokens_BT=tokens_BT,
        before=before[1] if before else None,
        steps=progress.step - before[0] if before else None,
    )
    return Finding(progress, found, time.monotonic() - begun)
