"""Lets a language model write, so that a person can read how far it is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from instar.config.errors import ConfigError
from instar.config.record import RecordConfig
from instar.data.tokenizer import Tokenizer, load_tokenizer
from instar.models.generate import generate
from instar.models.gpt import GPT
from instar.run.step import enter

if TYPE_CHECKING:
    from instar.run.trainer import Trainer

logger = logging.getLogger(__name__)

TEMPERATURE = 0.8
TOP_K = 50


class Writer:
    """Writes on rank 0, at the evaluation after every `sample_every` steps, and at the end.

    Draws from a generator of its own: training does not know of it.
    """

    def __init__(self, config: RecordConfig, run: Path) -> None:
        self.config, self.run = config, run
        self.wrote_at = 0

    def write_if_due(self, trainer: Trainer, *, last: bool = False) -> None:
        step, every = trainer.progress.step, self.config.sample_every
        due = last or (every is not None and step >= self.wrote_at + every)
        if not due or not trainer.world.is_main or not self.config.sample_tokens:
            return
        if step == self.wrote_at or trainer.evaluated_at != step:
            return
        model = trainer.stepper.bare_model
        if not isinstance(model, GPT) or (tokenizer := self._tokenizer()) is None:
            return
        self.wrote_at = step
        enter(model, step)
        prompt = self.config.sample_prompt or "\n"
        try:
            with trainer.stepper.averaged_weights(), trainer.stepper.autocast():
                text = _write(model, tokenizer, prompt, self.config.sample_tokens)
        except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
            # weights that are not finite have no distribution to draw from; the run goes on
            trainer.narrator.warn(f"step {step:,}: the model could not write: {error}", step)
            return
        trainer.narrator.wrote(trainer.progress, prompt, text)

    def _tokenizer(self) -> Tokenizer | None:
        try:
            return load_tokenizer(self.run)
        except ConfigError as error:
            logger.info("no sample: %s", error)
            return None


def _write(model: GPT, tokenizer: Tokenizer, prompt: str, tokens: int) -> str:
    """What the model goes on to write, without the prompt."""
    device = next(model.parameters()).device
    start = torch.tensor([tokenizer.encode(prompt).tolist()], device=device)
    written = generate(
        model,
        start,
        tokens,
        temperature=TEMPERATURE,
        top_k=TOP_K,
        generator=torch.Generator().manual_seed(0),
    )
    return tokenizer.decode(written[0, start.shape[1] :].tolist())
