"""Training of causal language models of transformers: continued pretraining and fine-tuning.

Importing the module does not import torch; building a model does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from instar.config.errors import ConfigError
from instar.config.language import CausalLMConfig
from instar.config.load import Loaded
from instar.config.schema import RunConfig
from instar.models.hf.pretrained import LoraShape
from instar.models.shape import ArchitectureError
from instar.tasks.task import Module, SavedModel
from instar.tasks.text import TextSpec, TextTask, adapter_lines


@dataclass(frozen=True, eq=False)
class CausalLMSpec(TextSpec):
    """`TaskSpec` of a causal language model of transformers on text."""

    config: CausalLMConfig
    architecture: LoraShape

    task_class = "instar.tasks.causal_lm:CausalLMTask"

    @classmethod
    def resolved(cls, loaded_config: Loaded, vocab_size: int) -> LoraShape:
        config = _causal(loaded_config.config)
        try:
            shape = LoraShape(config.model.config or {})
        except ArchitectureError as error:
            problems = (
                loaded_config.problem("model.config", p.message, p.hint) for p in error.problems
            )
            raise ConfigError(*problems) from None
        if vocab_size > shape.vocab_size:
            message = f"data.tokenizer has {vocab_size:,} tokens, and the model's table {shape.vocab_size:,} rows"
            hint = "leave it out: the tokenizer comes with the weights"
            raise ConfigError(loaded_config.problem("data.tokenizer", message, hint))
        return shape

    @classmethod
    def section(cls, config: Mapping[str, Any], architecture: Mapping[str, Any]) -> dict[str, Any]:
        del config
        shape = LoraShape.from_dict(architecture)
        if shape.lora:
            raise ValueError(
                "it has adapters: `instar checkpoint export RUN FOLDER --to hf` merges them, and a run starts "
                "from the folder"
            )
        return {"config": shape.to_dict()}

    @classmethod
    def saved(cls, config: RunConfig, architecture: Mapping[str, Any]) -> SavedModel:
        initial = LoraShape(_causal(config).model.config or {})
        return SavedModel(initial, LoraShape.from_dict(architecture).to_dict(), _module)

    @property
    def derived(self) -> dict[str, object]:
        return {**super().derived, "model.context": self.config.full_context}

    @property
    def refuses_shards(self) -> str:
        return "a model of transformers is whole on every rank"

    def style(self, architecture: LoraShape) -> Sequence[tuple[str, Sequence[str]]]:
        kind = f"{architecture.family.name}, {'tied' if architecture.tied else 'untied'} head"
        adapters = adapter_lines(architecture.lora)
        return [*super().style(architecture), ("style", [kind]), ("adapters", adapters)]


def _module(shape: LoraShape, *, checkpointing: bool = False, seed: int | None = None) -> Module:
    from instar.models.hf.module import PretrainedModel

    return PretrainedModel(shape, gradient_checkpointing=checkpointing, seed=seed)


def _causal(config: RunConfig) -> CausalLMConfig:
    assert isinstance(config, CausalLMConfig)
    return config


class CausalLMTask(TextTask):
    """`Task` of a causal language model of transformers on text."""

    config: CausalLMConfig
    architecture: LoraShape

    @property
    def random(self) -> bool:
        """Always true: some families have dropout."""
        return True

    def build(self) -> Module:
        return self._build_model(None if self.config.starts_from else self.config.seed)

    def shell(self) -> Module:
        return self._build_model(None)

    def _build_model(self, seed: int | None) -> Module:
        checkpointing = self.config.train.gradient_checkpointing
        return _module(self.architecture, checkpointing=checkpointing, seed=seed)
