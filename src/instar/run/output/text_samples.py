"""Sample texts, generated during training."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from instar.config.errors import ConfigError
from instar.config.sections import RecordConfig
from instar.data.text.tokenizer import Tokenizer, load_saved_tokenizer
from instar.distributed.agree import gather
from instar.distributed.world import World
from instar.run.output.run_logger import RunLogger
from instar.run.state.run_state import Interval, RunState
from instar.run.step.stepper import Stepper, set_model_step
from instar.tasks.task import GeneratesText

logger = logging.getLogger(__name__)


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
        prompt = self._config.sample_prompt or "\n"
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
