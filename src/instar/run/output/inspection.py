"""Looks at the model during training: texts that it writes, and an analysis of its weights in a thread of rank 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from instar.config.budget import Counters
from instar.config.errors import ConfigError
from instar.config.sections import RecordConfig
from instar.data.source import Source
from instar.data.text.tokenizer import Tokenizer, default_prompt, load_saved_tokenizer
from instar.distributed.agree import agree, gather, raise_on_all_ranks
from instar.distributed.shards import full_tensor
from instar.distributed.world import World
from instar.growth.analysis import CausalAttention, WeightAnalysis, analyze, attention_entropy
from instar.models.shape import Parameter
from instar.run.optimizer import copy_tensors
from instar.run.output.run_logger import RunLogger
from instar.run.output.save import in_background
from instar.run.state.run_state import Interval, RunState
from instar.run.step.stepper import Stepper, set_model_step, to_device
from instar.tasks.task import GeneratesText

SAMPLES = 4
"""number of held-out samples for the entropy of attention heads"""
LAST_WAIT_S = 60.0

Analyzed = tuple[Counters, WeightAnalysis, float]
"""(progress at the analysis, its result, its duration in seconds)"""

logger = logging.getLogger(__name__)


class WeightAnalyzer:
    """Runs one analysis at a time; skips one that is due while another is running, and warns of the first."""

    def __init__(self, every: int | None, world: World) -> None:
        """
        Args:
            every: steps between analyses; None: no analyses.
        """
        self._world = world
        self._every = None if every is None else Interval(every)
        self._pending: Future[Analyzed] | None = None
        self._before: tuple[int, Mapping[str, torch.Tensor]] | None = None
        """step and weights of the last analysis that was begun"""
        self._has_skipped = False

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
        if before is not None and not (begins or already_done or self._has_skipped):
            self._has_skipped = True
            run_logger.warn(
                f"step {step:,}: no analysis of the weights, because that of step {before[0]:,} is still running; "
                "later ones are left out alike: set a longer record.analyze_every",
                step,
            )
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
        if pending is None or self._before is None:
            return
        if not wait([pending], LAST_WAIT_S).done:
            begun_at = self._before[0]
            run_logger.warn(
                f"the analysis of the weights of step {begun_at:,} is not recorded: it was not done {LAST_WAIT_S:g} s "
                "after the last step; set a longer record.analyze_every",
                state.step,
            )
            return
        try:
            run_logger.log_analysis(*pending.result())
        except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
            # a failed analysis must not end the run
            run_logger.warn(f"the analysis failed: {error}", state.step)


class TextSampler:
    """Generates text at the evaluation after every `sample_every` steps, and at the end; on rank 0, or
    where forward passes are collectives on all ranks alike.

    It has its own random generator, so training is bit-identical with and without it.
    """

    def __init__(self, config: RecordConfig, run: Path, world: World) -> None:
        self._run, self._config, self._world = run, config, world
        self._every = Interval(config.sample_every) if config.sample_every else None

    def sample_if_due(
        self, state: RunState, stepper: Stepper, run_logger: RunLogger, *, last: bool = False
    ) -> RunState:
        """Generate a text if due; return the state with the step of the sample.

        Args:
            last: the run ends here, so a sample is due.
        """
        step, model, task = state.step, stepper.unwrapped_model, stepper.task
        due = last or (self._every is not None and self._every.due(0, step - state.sampled_at))
        if not due or step == state.sampled_at or state.evaluated_at != step:
            return state
        is_collective = stepper.strategy.forward_is_collective
        if not (self._config.sample_tokens and (self._world.is_main or is_collective)):
            return state
        tokenizer = self._tokenizer() if isinstance(task, GeneratesText) else None
        # only rank 0's folder is certain to have the tokenizer, and all ranks compute or none
        if is_collective and not all(gather(self._world, tokenizer is not None)):
            return state
        if not isinstance(task, GeneratesText) or tokenizer is None:
            return state
        set_model_step(model, step)
        prompt = self._config.sample_prompt or default_prompt(tokenizer)
        try:
            with stepper.evaluating(), stepper.autocast():
                text = task.sample_text(model, tokenizer, prompt, self._config.sample_tokens)
        except (ArithmeticError, ConfigError, MemoryError, RuntimeError, ValueError) as error:
            # weights that are not finite give no distribution to draw from; the run continues
            run_logger.warn(f"step {step:,}: no sample text was generated: {error}", step)
        else:
            run_logger.log_sample_text(state.progress, prompt, text)
        return replace(state, sampled_at=step)

    def _tokenizer(self) -> Tokenizer | None:
        try:
            return load_saved_tokenizer(self._run)
        except ConfigError as error:
            logger.info("no sample text: %s", error)
            return None


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
