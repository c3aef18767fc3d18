"""Config sections of a causal language model of transformers."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from instar.config.errors import ConfigProblem
from instar.config.language import TextConfig
from instar.config.schema import NAME, Name
from instar.config.sections import FROM, Context, ModelSection

CONTEXT = 1024
"""Default of `model.context`, unless the model can read less."""


class PretrainedConfig(ModelSection):
    """The model of transformers that is trained."""

    context: Context | None = Field(
        None,
        description=f"tokens per sample; default: {CONTEXT}, or what the model can read if that is less",
    )
    config: dict[str, Any] | None = Field(
        None,
        description="values of config.json, completed; they come with `from`, and without it the model "
        "begins with random weights",
    )


class CausalLMConfig(TextConfig):
    """A whole run of a causal language model of transformers on text."""

    name: Name = Field("finetune", description=NAME)
    model: PretrainedConfig = Field(
        default_factory=PretrainedConfig, description="the model of transformers"
    )

    def conflicts(self) -> list[ConfigProblem]:
        conflicts = super().conflicts()
        if self.starts_from is None and self.model.config is None:
            conflicts.append(
                ConfigProblem(
                    (f"model.{FROM}", "task"),
                    f"model.{FROM} must name the folder of a model of transformers",
                    "a model on the hub is downloaded with: hf download NAME --local-dir FOLDER",
                )
            )
        longest = self.longest_context
        if self.model.context is not None and longest is not None and self.model.context > longest:
            conflicts.append(
                ConfigProblem(
                    ("model.context",),
                    f"model.context is {self.model.context:,}, but the model reads at most "
                    f"{longest:,} tokens",
                )
            )
        return conflicts

    @property
    def full_context(self) -> int:
        if self.model.context is not None:
            return self.model.context
        return min(CONTEXT, self.longest_context or CONTEXT)

    @property
    def longest_context(self) -> int | None:
        config = self.model.config or {}
        positions = config.get("max_position_embeddings", config.get("n_positions"))
        return positions if type(positions) is int and positions > 0 else None
