"""What is known of a language run before torch is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from instar.config.budget import parse_budget
from instar.config.errors import ConfigError, Problem
from instar.config.language import LanguageConfig
from instar.config.load import Loaded
from instar.config.schema import RunConfig
from instar.data import dataset as data
from instar.data.dataset import DataSet
from instar.data.source import windows_of
from instar.data.tokenizer import TOKENIZER_FILE, named_tokenizer
from instar.models.architecture import Architecture, flops_per_token, resolve
from instar.models.memory import ALL_TRAIN, Still, memory_estimate
from instar.models.shape import ArchitectureError
from instar.tasks.blueprint import Say

if TYPE_CHECKING:
    from instar.tasks.language import LanguageTask

EVAL_TOKENS = 8192
"""Tokens of one evaluation micro-batch unless the config says how many samples it has."""
_BYTES = 256
"""tokens of the byte tokenizer, and a guess for one of characters"""


@dataclass(frozen=True, eq=False)
class LanguageBlueprint:
    """A GPT on text."""

    config: LanguageConfig
    architecture: Architecture
    units: Callable[[int], int | None]
    """of a text that makes as many samples of some context as there are to train on; None: nobody
    has counted them"""
    dataset: DataSet | None = None
    """None: not made yet"""

    unit = "token"

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
    def folder(self) -> Path:
        """Of the data, which are there."""
        assert self.dataset is not None
        return self.dataset.path

    @property
    def kept(self) -> dict[str, Path]:
        """The tokenizer."""
        return {TOKENIZER_FILE: self.folder / TOKENIZER_FILE}

    def check_test(self) -> None:
        assert self.dataset is not None
        self.dataset.held_out("test", self.architecture.context)

    def samples(self, context: int) -> int | None:
        tokens = self.units(context)
        return None if tokens is None else windows_of(tokens, context)

    def weight(self, context: int) -> int:
        return context

    def flops(self, architecture: Architecture, context: int) -> int:
        return flops_per_token(architecture, context)

    def memory(
        self,
        architecture: Architecture,
        context: int,
        batch_size: int,
        device: str,
        still: Still = ALL_TRAIN,
    ) -> dict[str, int]:
        config = self.config
        return memory_estimate(
            architecture,
            still,
            batch_size=batch_size,
            context=context,
            precision=config.precision,
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
        adapters = [
            f"{each.target} of rank {each.rank}, alpha {each.alpha:g}" for each in arch.lora
        ]
        return [("shape", shape), ("style", [", ".join(style)]), ("adapters", adapters)]

    def task(self, config: RunConfig) -> LanguageTask:
        from instar.tasks.language import LanguageTask

        assert self.dataset is not None
        return LanguageTask(_text(config), self.architecture, self.dataset)


def prepare(loaded: Loaded, world_size: int, say: Say) -> None:
    """See `Kind`."""
    config = _text(loaded.config)
    data.prepare_data(config.data, config.seed, world_size, say)


def blueprint(loaded: Loaded, world_size: int) -> LanguageBlueprint:
    """See `Kind`."""
    config = _text(loaded.config)
    dataset = data.open_data(config.data, config.seed, world_size)
    made = LanguageBlueprint(
        config, resolved(loaded, dataset.vocab_size), dataset.train_tokens, dataset
    )
    context = made.architecture.context
    dataset.held_out("val", context)
    samples = dataset.train_samples(context)
    problems: list[Problem] = []
    if samples is not None and samples < world_size:
        problems.append(
            loaded.problem(
                "data.source",
                f"{world_size} ranks, but only {samples} training samples of {context} tokens",
                "use fewer ranks, a smaller model.context or more text",
            )
        )
    if samples is None:
        problems += _epochs(loaded)
    if problems:
        raise ConfigError(*problems)
    return made


def assumed(loaded: Loaded, say: Say) -> LanguageBlueprint:
    """See `Kind`: of data that are not there, the vocabulary is guessed."""
    config = _text(loaded.config)
    missing = [str(path) for path in data.folders(config.data, config.seed) if not path.exists()]
    if not missing:
        dataset = data.open_data(config.data, config.seed)
        return LanguageBlueprint(
            config, resolved(loaded, dataset.vocab_size), dataset.train_tokens, dataset
        )
    named = named_tokenizer(config.data.tokenizer)
    trained = config.data.vocab_size if config.data.tokenizer == "bpe" else _BYTES
    vocabulary = trained if named is None else named.vocab_size
    say(f"no data in {', '.join(missing)} yet: a vocabulary of {vocabulary:,} is assumed")
    return LanguageBlueprint(config, resolved(loaded, vocabulary), lambda _: None)


def resolved(loaded: Loaded, vocab_size: int) -> Architecture:
    """The shape that the config asks for. Raises ConfigError with all that is wrong with it."""
    try:
        return resolve(_text(loaded.config).model, vocab_size)
    except ArchitectureError as error:
        raise ConfigError(
            *(loaded.problem(m.key, m.message, m.hint) for m in error.mistakes)
        ) from None


def _text(config: RunConfig) -> LanguageConfig:
    assert isinstance(config, LanguageConfig)
    return config


def _epochs(loaded: Loaded) -> list[Problem]:
    """Epochs that would have to be counted whose length nobody knows yet."""
    config = loaded.config
    counted = any(parse_budget(text).kind == "epochs" for text in config.train.until)
    changes = [op.name for op in config.schedule if op.name in ("set_context", "extend_context")]
    if not (counted and changes):
        return []
    return [
        loaded.problem(
            "train.until",
            f"{changes[0]} begins a stream anew, and how much of an epoch was done by then is "
            "not known before its end was met",
            "give train.until in steps or tokens, or use kind rows or tokens",
        )
    ]
