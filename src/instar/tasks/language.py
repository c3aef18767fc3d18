"""Language modelling, next-token prediction: with a GPT, or with a causal language model of transformers.

Importing the module does not import torch; building a model does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from instar.config.errors import ConfigError
from instar.config.language import CausalLMConfig, LanguageConfig
from instar.config.load import Loaded
from instar.config.schema import RunConfig
from instar.data.source import IGNORED
from instar.models.architecture import Architecture, resolve_architecture, section_of
from instar.models.cost import NONE_FROZEN, FrozenParameters, memory_estimate
from instar.models.hf.cost import pretrained_memory
from instar.models.hf.families import BUILT_IN
from instar.models.hf.pretrained import LoraShape
from instar.models.shape import ArchitectureError, windows_text
from instar.tasks.task import Batch, Module, SavedModel, Tensor
from instar.tasks.text import TextSpec, TextTask, adapter_lines

_DERIVED = ("n_kv_head", "n_mlp", "vocab_size")
"""fields of the shape that a config may leave open"""


@dataclass(frozen=True, eq=False)
class LanguageSpec(TextSpec):
    """`TaskSpec` of a GPT on text."""

    config: LanguageConfig
    architecture: Architecture

    task_class = "instar.tasks.language:LanguageTask"

    @classmethod
    def resolved(cls, loaded_config: Loaded, vocab_size: int) -> Architecture:
        return described_shape(loaded_config, vocab_size)

    @classmethod
    def section(cls, config: Mapping[str, Any], architecture: Mapping[str, Any]) -> dict[str, Any]:
        """See `TaskSpec`. Adapters do not count: they are merged into their weights."""
        del config
        shape = Architecture.from_dict(architecture)
        if (mask := shape.mask) is not None:
            raise ValueError(
                f"new {mask.axis} of this model are still masked: start from a checkpoint of step "
                f"{mask.end:,} or later"
            )
        if shape.loop is not None:
            raise ValueError("layers of this model are looped: unloop them first")
        return section_of(replace(shape, lora=())).model_dump(mode="json")

    @classmethod
    def saved(cls, config: RunConfig, architecture: Mapping[str, Any]) -> SavedModel:
        assert isinstance(config, LanguageConfig)
        model = config.model
        initial = resolve_architecture(model, model.vocab_size or architecture["vocab_size"])
        return SavedModel(initial, Architecture.from_dict(architecture).to_dict(), _gpt_module)

    @property
    def derived(self) -> dict[str, object]:
        shape = {f"model.{name}": getattr(self.architecture, name) for name in _DERIVED}
        return {**super().derived, **shape}

    def memory(
        self,
        architecture: Architecture,
        context: int,
        batch_size: int,
        device: str,
        frozen_parameters: FrozenParameters = NONE_FROZEN,
    ) -> dict[str, int]:
        setup = self.training_setup(context, batch_size, device)
        return memory_estimate(architecture, setup, frozen_parameters)

    def style(self, architecture: Architecture) -> list[tuple[str, list[str]]]:
        arch = architecture
        heads = f"{arch.n_head} heads"
        if arch.n_kv_head < arch.n_head:
            heads += f" ({arch.n_kv_head} for keys and values)"
        style = [arch.norm, arch.activation, f"{arch.positions} positions"]
        style += ["biases"] * arch.bias + ["QK-norm"] * arch.qk_norm
        if arch.embedding_multiplier != 1:
            style.append(f"embeddings times {arch.embedding_multiplier:g}")
        if arch.conv_size is not None:
            style.append(f"a convolution over {arch.conv_size} tokens")
        if (loop := arch.loop) is not None:
            style.append(f"layers {loop.first} to {loop.last} {loop.times} times")
        if arch.windows:
            style.append(f"windows of {windows_text(arch.windows)}")
        style += ["tied head" if arch.tied else "untied head"]
        style += [f"dropout {arch.dropout:g}"] * (arch.dropout > 0)
        shape = [
            f"{arch.n_layer} layers × {arch.n_embd} wide, {heads} of {arch.head_dim}",
            f"MLP {arch.n_mlp:,}, context {arch.context:,}, vocabulary {arch.vocab_size:,}",
        ]
        if arch.num_experts is not None:
            shape.append(f"{arch.num_experts} experts, {arch.num_experts_per_tok} per token")
        adapters = adapter_lines(arch.lora)
        return [("shape", shape), ("style", [", ".join(style)]), ("adapters", adapters)]


def _gpt_module(
    shape: Architecture, *, checkpointing: bool = False, seed: int | None = None
) -> Module:
    from instar.models.gpt import GPT

    model = GPT(shape, gradient_checkpointing=checkpointing)
    if seed is not None:
        model.init_weights(seed)
    return model


def described_shape(loaded_config: Loaded, vocab_size: int) -> Architecture:
    """Return the shape that the config describes.

    Raises:
        ConfigError: lists every mistake in the shape.
    """
    try:
        assert isinstance(loaded_config.config, LanguageConfig)
        return resolve_architecture(loaded_config.config.model, vocab_size)
    except ArchitectureError as error:
        has_weights = loaded_config.config.starts_from is not None
        hint = "data.tokenizer must be that of the weights" if has_weights else ""
        raise ConfigError(
            *(loaded_config.problem(m.keys[0], m.message, hint or m.hint) for m in error.problems)
        ) from None


class LanguageTask(TextTask):
    """`Task` of a GPT on text."""

    config: LanguageConfig
    architecture: Architecture

    @property
    def random(self) -> bool:
        return self.architecture.dropout > 0

    def build(self) -> Module:
        return self._build_model(self.config.seed)

    def shell(self) -> Module:
        return self._build_model(None)

    def _build_model(self, seed: int | None) -> Module:
        checkpointing = self.config.train.gradient_checkpointing
        return _gpt_module(self.architecture, checkpointing=checkpointing, seed=seed)

    def initial_values(self) -> Mapping[str, Tensor]:
        from instar.models.gpt import InitialValues

        return InitialValues(self.architecture.parameters(), self.config.seed)

    def loss_sum(self, model: Module, batch: Batch) -> Tensor:
        """See `Task`. With experts, the gradient is that of the loss and of `router_aux_loss_coef` times
        the load-balancing loss of each block; the value is the loss alone."""
        import torch

        from instar.tasks.logged import log

        loss: Tensor
        balance: Tensor
        inputs, targets, arch = batch["inputs"], batch["targets"], self.architecture
        coefficient = arch.router_aux_loss_coef if arch.n_layer else None
        if coefficient is None or not torch.is_grad_enabled():
            loss = model(inputs, targets, **self.places_of(batch))
            return loss
        loss, balance = model(inputs, targets, balance=True, **self.places_of(batch))
        number = (targets != IGNORED).sum().clamp(min=1)
        log("load_balancing_loss", balance / (number * arch.n_layer))
        return loss + coefficient * (balance - balance.detach())


@dataclass(frozen=True, eq=False)
class CausalLMSpec(TextSpec):
    """`TaskSpec` of a causal language model of transformers on text."""

    config: CausalLMConfig
    architecture: LoraShape

    task_class = "instar.tasks.language:CausalLMTask"

    @classmethod
    def resolved(cls, loaded_config: Loaded, vocab_size: int) -> LoraShape:
        config = _causal(loaded_config.config)
        try:
            shape = LoraShape.from_dict(config.model.config or {})
        except ArchitectureError as error:
            problems = (
                loaded_config.problem("model.config", p.message, p.hint) for p in error.problems
            )
            raise ConfigError(*problems) from None
        if config.data.document_masks and shape.config["model_type"] not in BUILT_IN:
            message = "data.document_masks: whether a model of this family keeps documents apart is not known"
            raise ConfigError(loaded_config.problem("data.document_masks", message, "leave it out"))
        if vocab_size > shape.vocab_size:
            message = f"data.tokenizer has {vocab_size:,} tokens, and the model's table {shape.vocab_size:,} rows"
            hint = "leave it out: the tokenizer comes with the weights"
            raise ConfigError(loaded_config.problem("data.tokenizer", message, hint))
        return shape

    @classmethod
    def section(cls, config: Mapping[str, Any], architecture: Mapping[str, Any]) -> dict[str, Any]:
        del config
        return {"config": LoraShape.from_dict(architecture).to_dict()}

    @classmethod
    def saved(cls, config: RunConfig, architecture: Mapping[str, Any]) -> SavedModel:
        initial = LoraShape.from_dict(_causal(config).model.config or {})
        return SavedModel(initial, LoraShape.from_dict(architecture).to_dict(), _pretrained_module)

    @property
    def derived(self) -> dict[str, object]:
        return {**super().derived, "model.context": self.config.full_context}

    @property
    def warnings(self) -> list[str]:
        if not self.architecture.config.get("output_router_logits"):
            return super().warnings
        coefficient = self.architecture.config.get("router_aux_loss_coef")
        return [
            *super().warnings,
            f"router_aux_loss_coef ({coefficient}) of the model's config has no effect: output_router_logits asks for the "
            "load-balancing loss of transformers, which task: causal_lm does not train",
        ]

    def memory(
        self,
        architecture: LoraShape,
        context: int,
        batch_size: int,
        device: str,
        frozen_parameters: FrozenParameters = NONE_FROZEN,
    ) -> dict[str, int]:
        setup = self.training_setup(context, batch_size, device)
        return pretrained_memory(architecture, setup, frozen_parameters)

    def style(self, architecture: LoraShape) -> Sequence[tuple[str, Sequence[str]]]:
        kind = f"{architecture.family.name}, {'tied' if architecture.tied else 'untied'} head"
        adapters = adapter_lines(architecture.lora)
        return [*super().style(architecture), ("style", [kind]), ("adapters", adapters)]


def _pretrained_module(
    shape: LoraShape, *, checkpointing: bool = False, seed: int | None = None
) -> Module:
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

    def initial_values(self) -> Mapping[str, Tensor]:
        from instar.models.hf.module import DrawnValues

        return DrawnValues(self.architecture, self.config.seed)

    def _build_model(self, seed: int | None) -> Module:
        checkpointing = self.config.train.gradient_checkpointing
        return _pretrained_module(self.architecture, checkpointing=checkpointing, seed=seed)
