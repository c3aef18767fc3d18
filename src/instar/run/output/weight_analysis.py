"""Weight analysis during training, on a copy of the weights, in a thread of rank 0."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from instar.config.budget import Counters
from instar.data.source import Source
from instar.distributed.agree import agree, raise_on_all_ranks
from instar.distributed.shards import full_tensor
from instar.distributed.world import World
from instar.growth.analysis import (
    CausalAttention,
    WeightAnalysis,
    analyze,
    attention_entropy,
)
from instar.models.shape import Parameter
from instar.run.optim.optimizer import copy_tensors
from instar.run.output.run_logger import RunLogger
from instar.run.output.save import in_background
from instar.run.state.run_state import Interval, RunState
from instar.run.step.stepper import Stepper, set_model_step, to_device

SAMPLES = 4
"""number of held-out samples for the entropy of attention heads"""
LAST_WAIT_S = 60.0


Analyzed = tuple[Counters, WeightAnalysis, float]
"""(progress at the analysis, its result, its duration in seconds)"""


class WeightAnalyzer:
    """Runs one analysis at a time; skips one that is due while another is running."""

    def __init__(self, every: int | None, world: World) -> None:
        """
        Args:
            every: steps between analyses; None: no analyses.
        """
        self._world = world
        self._every = None if every is None else Interval(every)
        self._pending: Future[Analyzed] | None = None
        self._before: tuple[int, Mapping[str, torch.Tensor]] | None = None

    def analyze_if_due(
        self, state: RunState, stepper: Stepper, validation: Source, run_logger: RunLogger
    ) -> None:
        """Start an analysis at the end of every interval; record one that has finished.

        A collective if the weights are sharded.
        """
        if self._pending is not None and self._pending.done():
            self.finish(state, run_logger)
        before, step = self._before, state.step
        is_collective = stepper.strategy.forward_is_collective
        if not state.due(self._every) or not (self._world.is_main or is_collective):
            return
        already_done = before is not None and before[0] == step
        begins = self._pending is None and not already_done
        if is_collective:
            begins = bool(agree(self._world, begins))
        if not begins:
            return
        task = stepper.task
        model: torch.nn.Module | None = None
        with (
            raise_on_all_ranks(self._world, "analyzing the weights")
            if is_collective
            else nullcontext()
        ):
            # what the others gather with it begins once rank 0 has the memory
            model = task.shell() if self._world.is_main else None
        for name, parameter in stepper.parameters.items():
            weights = full_tensor(parameter)
            if model is not None:
                copy_tensors({name: model.get_parameter(name)}, {name: weights})
        if model is None:
            return
        set_model_step(model, step)
        indices = np.arange(min(SAMPLES, len(validation)))
        batch = to_device(validation.read(indices), torch.device("cpu"))
        self._before = step, {name: p.detach() for name, p in model.named_parameters()}
        analyze = partial(
            _analyze, model.eval(), task.architecture.parameters(), batch, state.progress, before
        )
        self._pending = in_background(analyze, "instar-weight-analysis")

    def finish(self, state: RunState, run_logger: RunLogger) -> None:
        """Record the running analysis, if there is one; wait for it up to `LAST_WAIT_S` seconds."""
        pending, self._pending = self._pending, None
        if pending is None or not wait([pending], LAST_WAIT_S).done:
            return
        try:
            run_logger.log_analysis(*pending.result())
        except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
            # a failed analysis must not end the run
            run_logger.warn(f"the analysis failed: {error}", state.step)


def _analyze(
    model: torch.nn.Module,
    parameters: Mapping[str, Parameter],
    batch: Mapping[str, torch.Tensor],
    progress: Counters,
    before: tuple[int, Mapping[str, torch.Tensor]] | None,
) -> Analyzed:
    start = time.monotonic()
    heads = attention_entropy(model, batch["inputs"]) if isinstance(model, CausalAttention) else ()
    analysis = analyze(
        dict(model.named_parameters()),
        parameters,
        heads=heads,
        before=before[1] if before else None,
        steps=progress.step - before[0] if before else None,
    )
    return progress, analysis, time.monotonic() - start
