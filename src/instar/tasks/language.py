"""Language modelling: next-token prediction with a GPT.

Importing the module does not import torch; building a model does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from instar.config.errors import ConfigError
from instar.config.language import BITS_PER_BYTE, LanguageConfig
from instar.config.load import Loaded
from instar.config.schema import RunConfig
from instar.data.order import Order
from instar.data.source import IGNORED, Source, windows_of
from instar.data.text import dataset as data
from instar.data.text.dataset import DataSet
from instar.data.text.tokenizer import (
    TOKENIZER_FILE,
    Tokenizer,
    load_tokenizer,
    named_tokenizer,
    token_bytes,
)
from instar.models.architecture import Architecture, resolve, section_of
from instar.models.cost import NONE_FROZEN, FrozenParameters, flops_per_token, memory_estimate
from instar.models.shape import ArchitectureError
from instar.record.system import has_bf16_units
from instar.tasks.task import Batch, Measured, SavedModel, Say, Tally, Task, TaskSpec

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from instar.models.gpt import GPT

EVAL_TOKENS = 8192
"""Tokens per evaluation micro-batch unless `eval.batch_size` is set."""
_BYTES = 256
"""vocabulary of the byte tokenizer, and the assumption for a character tokenizer"""


@dataclass(frozen=True, eq=False)
class LanguageSpec(TaskSpec):
    """`TaskSpec` of a GPT on text."""

    config: LanguageConfig
    architecture: Architecture
    tokens: Callable[[int], int | None]
    """for a context length, tokens of a text with as many samples as the training split has; None
    if unknown"""
    dataset: DataSet | None = None
    """None: not prepared yet"""

    unit = "token"
    task_class = "instar.tasks.language:LanguageTask"

    @classmethod
    def prepare(cls, loaded: Loaded, world_size: int, say: Say) -> None:
        config = _text(loaded.config)
        data.prepare_data(config.data, config.data_seed, world_size, say)

    @classmethod
    def open(cls, loaded: Loaded, world_size: int) -> Self:
        config = _text(loaded.config)
        dataset = data.open_data(config.data, config.data_seed, world_size)
        made = cls(config, resolved(loaded, dataset.vocab_size), dataset.train_tokens, dataset)
        if made.token_bytes is None and (key := _asks_for_bytes(config)):
            raise ConfigError(
                loaded.problem(
                    key,
                    f"{key}: {BITS_PER_BYTE} is not known of this tokenizer: how many bytes of text a "
                    "token stands for is known of byte, char and byte-level BPE",
                    "use loss",
                )
            )
        context = made.architecture.context
        dataset.held_out("val", context)
        samples = dataset.train_samples(context)
        if samples is not None and samples < world_size:
            raise ConfigError(
                loaded.problem(
                    "data.source",
                    f"{world_size} ranks, but only {samples} training samples of {context} tokens",
                    "use fewer ranks, a smaller model.context or more text",
                )
            )
        return made

    @classmethod
    def assume(cls, loaded: Loaded, say: Say, world_size: int = 1) -> Self:
        """See `TaskSpec`: the vocabulary of data that are missing is assumed."""
        config = _text(loaded.config)
        missing = data.missing(config.data, config.data_seed, say)
        if not missing:
            return cls.open(loaded, world_size)
        named = named_tokenizer(config.data.tokenizer)
        trained = config.data.vocab_size if config.data.tokenizer == "bpe" else _BYTES
        vocabulary = trained if named is None else named.vocab_size
        say(
            f"no data in {', '.join(map(str, missing))} yet, which a run would prepare: a vocabulary "
            f"of {vocabulary:,} is assumed"
        )
        return cls(config, resolved(loaded, vocabulary), lambda _: None)

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
        return section_of(replace(shape, lora=())).model_dump(mode="json")

    @classmethod
    def saved(cls, config: RunConfig, architecture: Mapping[str, Any]) -> SavedModel:
        model = _text(config).model
        begun = resolve(model, model.vocab_size or architecture["vocab_size"])
        return SavedModel(begun, Architecture.from_dict(architecture).to_dict(), _module)

    @cached_property
    def token_bytes(self) -> NDArray[np.int64] | None:
        """Bytes of text of each token; None if unknown, or if the data are not prepared."""
        return None if self.dataset is None else token_bytes(load_tokenizer(self.dataset.path))

    @property
    def opened(self) -> DataSet:
        """The data, which must be prepared."""
        assert self.dataset is not None
        return self.dataset

    @property
    def derived(self) -> dict[str, object]:
        found: dict[str, object] = {}
        if self.dataset is not None and not self.config.data.mixture:  # parts each have a folder
            found["data.path"] = str(self.dataset.path)
        for field in ("n_kv_head", "n_mlp", "vocab_size"):
            found[f"model.{field}"] = getattr(self.architecture, field)
        found["eval.batch_size"] = max(1, EVAL_TOKENS // self.architecture.context)
        return found

    @property
    def kept(self) -> dict[str, Path]:
        """The tokenizer's file."""
        return {TOKENIZER_FILE: self.opened.path / TOKENIZER_FILE}

    def train(self, context: int, seed: int) -> tuple[Source, Order]:
        return self.opened.train(context, seed)

    def held_out(self, split: str, context: int) -> Source:
        return self.opened.held_out(split, context)

    @property
    def fingerprints(self) -> dict[str, str]:
        found = self.opened
        return {"data": found.fingerprint, "tokenizer": found.tokenizer_fingerprint}

    def samples(self, context: int) -> int | None:
        tokens = self.tokens(context)
        return None if tokens is None else windows_of(tokens, context)

    def split_sizes(self, context: int) -> dict[str, int | None]:
        return {} if self.dataset is None else super().split_sizes(context)

    def weight(self, context: int) -> int:
        return context

    def units(self, context: int) -> int | None:
        return self.tokens(context)

    def flops(self, architecture: Architecture, context: int) -> int:
        return flops_per_token(architecture, context)

    def memory(
        self,
        architecture: Architecture,
        context: int,
        batch_size: int,
        device: str,
        still: FrozenParameters = NONE_FROZEN,
    ) -> dict[str, int]:
        config = self.config
        return memory_estimate(
            architecture,
            still,
            batch_size=batch_size,
            context=context,
            precision=_likely(config.precision, device),
            optimizer=config.optimizer.name,
            ema=config.train.ema is not None,
            gradient_checkpointing=config.train.gradient_checkpointing,
            device=device,
        )

    def style(self, architecture: Architecture) -> list[tuple[str, list[str]]]:
        arch = architecture
        heads = f"{arch.n_head} heads"
        if arch.n_kv_head < arch.n_head:
            heads += f" ({arch.n_kv_head} for keys and values)"
        style = [arch.norm, arch.activation, f"{arch.positions} positions"]
        style += ["biases"] * arch.bias + ["QK-norm"] * arch.qk_norm
        style += ["tied head" if arch.tied else "untied head"]
        style += [f"dropout {arch.dropout:g}"] * (arch.dropout > 0)
        shape = [
            f"{arch.n_layer} layers × {arch.n_embd} wide, {heads} of {arch.head_dim}",
            f"MLP {arch.n_mlp:,}, context {arch.context:,}, vocabulary {arch.vocab_size:,}",
        ]
        if arch.num_experts is not None:
            shape.append(f"{arch.num_experts} experts, {arch.num_experts_per_tok} per token")
        adapters = [
            f"{each.target} of rank {each.rank}, alpha {each.alpha:g}" for each in arch.lora
        ]
        return [("shape", shape), ("style", [", ".join(style)]), ("adapters", adapters)]


def _asks_for_bytes(config: LanguageConfig) -> str:
    """Return a key that names the metric bits_per_byte, or an empty string."""
    rules = enumerate(config.early_stopping.rules)
    asked = {f"early_stopping.rules[{number}].metric": rule.metric for number, rule in rules}
    asked |= {f"checkpoint.best_of[{n}]": name for n, name in enumerate(config.checkpoint.best_of)}
    asked["learning_rate.plateau.metric"] = config.learning_rate.plateau.metric
    return next((key for key, metric in asked.items() if metric == BITS_PER_BYTE), "")


def _module(shape: Architecture) -> GPT:
    from instar.models.gpt import GPT

    return GPT(shape)


def resolved(loaded: Loaded, vocab_size: int) -> Architecture:
    """Return the shape that the config describes.

    Raises:
        ConfigError: lists every mistake in the shape.
    """
    try:
        return resolve(_text(loaded.config).model, vocab_size)
    except ArchitectureError as error:
        hint = "data.tokenizer must be that of the weights" if loaded.config.starts_from else ""
        raise ConfigError(
            *(loaded.problem(m.keys[0], m.message, hint or m.hint) for m in error.problems)
        ) from None


def _text(config: RunConfig) -> LanguageConfig:
    assert isinstance(config, LanguageConfig)
    return config


def _likely(
    precision: Literal["auto", "fp32", "bf16", "fp16"], device: str
) -> Literal["fp32", "bf16", "fp16"]:
    """Return the precision; for `auto`, the likely one of a device that is not initialised yet."""
    if precision != "auto":
        return precision
    return "bf16" if device != "cpu" or has_bf16_units() else "fp32"


SAMPLE_TEMPERATURE, SAMPLE_TOP_K = 0.8, 50
"""sampling parameters of the text that a run generates during training"""
UNIT_TOKENS = 2048
"""tokens of held-out text per unit of the standard error: neighbouring windows are correlated"""


class LanguageTask(Task):
    """`Task` of a GPT on text. A sample is a window or document, its weight its target tokens."""

    spec: LanguageSpec
    config: LanguageConfig
    architecture: Architecture

    @property
    def metrics(self) -> Sequence[str]:
        known = self.spec.token_bytes is not None
        return tuple(name for name in self.config.metrics if known or name != BITS_PER_BYTE)

    @property
    def cluster(self) -> int:
        return max(1, UNIT_TOKENS // self.context)

    @property
    def random(self) -> bool:
        return self.architecture.dropout > 0

    def build(self) -> GPT:
        model = self.shell()
        model.init_weights(self.config.seed)
        return model

    def shell(self) -> GPT:
        from instar.models.gpt import GPT

        return GPT(
            self.architecture,
            gradient_checkpointing=self.config.train.gradient_checkpointing,
        )

    def initial_values(self) -> Mapping[str, torch.Tensor]:
        from instar.models.gpt import InitialValues

        return InitialValues(self.architecture.parameters(), self.config.seed)

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """See `Task`. With experts, the gradient is that of the loss and of `router_aux_loss_coef` times
        the load-balancing loss of each block; the value is the loss alone."""
        import torch

        from instar.tasks.logged import log

        loss: torch.Tensor
        balance: torch.Tensor
        inputs, targets, arch = batch["inputs"], batch["targets"], self.architecture
        if arch.router_aux_loss_coef is None or not torch.is_grad_enabled():
            loss = model(inputs, targets)
            return loss
        loss, balance = model(inputs, targets, balance=True)
        number = (targets != IGNORED).sum().clamp(min=1)
        log("load_balancing_loss", balance / (number * arch.n_layer))
        return loss + arch.router_aux_loss_coef * (balance - balance.detach())

    def measure(
        self,
        model: torch.nn.Module,
        batch: Batch,
        *,
        predict: bool = False,  # noqa: ARG002
    ) -> Measured:
        """Return the loss in nats per token and, if the bytes of tokens are known, in bits per byte:
        Σ nats / (ln 2 · Σ bytes), both sums over all targets."""
        import torch

        targets = batch["targets"]
        losses: torch.Tensor = model(batch["inputs"], targets, each=True)
        counted = targets != IGNORED
        tallies = {"loss": Tally(losses, counted.sum(1))}
        if (known := self.spec.token_bytes) is not None:
            table = torch.from_numpy(known).to(targets.device)
            sizes = torch.where(counted, table[targets.clamp(min=0).long()], 0).sum(1)
            tallies[BITS_PER_BYTE] = Tally(losses / math.log(2), sizes)
        return Measured(tallies)

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the perplexity, exp(loss), per token of this tokenizer."""
        loss = metrics["loss"]
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf}

    def outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = model(batch["inputs"])
        return logits

    def sample_text(
        self, model: torch.nn.Module, tokenizer: Tokenizer, prompt: str, tokens: int
    ) -> str:
        """See `GeneratesText`."""
        import torch

        from instar.models.sampling import generate

        device = next(model.parameters()).device
        start = torch.tensor([tokenizer.encode(prompt).tolist()], device=device)
        written = generate(
            cast("GPT", model),
            start,
            tokens,
            temperature=SAMPLE_TEMPERATURE,
            top_k=SAMPLE_TOP_K,
            vocab_size=tokenizer.vocab_size,
            generator=torch.Generator().manual_seed(0),
        )
        return tokenizer.decode(written[0, start.shape[1] :].tolist())
