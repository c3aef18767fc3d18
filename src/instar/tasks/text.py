"""What tasks on text share: a language model's tokens, loss, metrics and generated text.

Importing the module does not import torch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.config.language import BITS_PER_BYTE, TEXT_METRICS, DataConfig, TextConfig
from instar.config.load import Loaded
from instar.config.schema import RunConfig
from instar.data.order import Order
from instar.data.source import IGNORED, Source, windows_of
from instar.data.text import dataset as data
from instar.data.text.dataset import DataSet
from instar.data.text.shards import TokenDataset
from instar.data.text.targets import TargetCount, token_bytes
from instar.data.text.tokenizer import (
    Tokenizer,
    folder_of,
    load_saved_tokenizer,
    named_tokenizer,
    prompt_tokens,
    tokenizer_files,
)
from instar.models.cost import TrainingSetup, bf16_pays, flops_per_token
from instar.models.hf import CONFIG
from instar.models.hf.tokenizer import CHAT_TEMPLATE, COMPANIONS, SPECIAL_IDS
from instar.models.lora import Lora
from instar.models.shape import TransformerShape
from instar.record.system import has_bf16_units
from instar.tasks.task import Batch, Measured, Module, Say, Tally, Task, TaskSpec, Tensor

EVAL_TOKENS = 8192
"""Tokens per evaluation micro-batch unless `eval.batch_size` is set."""
_BYTES = 256
"""vocabulary of the byte tokenizer, and the assumption for a character tokenizer"""


@dataclass(frozen=True, eq=False)
class TextSpec(TaskSpec):
    """`TaskSpec` of a language model on text."""

    config: TextConfig
    tokens: Callable[[int], int | None]
    """for a context length, tokens of a text with as many samples as the training split has; None if unknown"""
    dataset: DataSet | None = None
    """None: not prepared yet"""
    sets: Mapping[str, TokenDataset] = field(default_factory=dict)
    """further held-out texts, by name"""
    _counts: dict[int, TargetCount] = field(default_factory=dict, repr=False)
    """by context: they are asked for at every stage"""

    unit = "token"

    @classmethod
    @abstractmethod
    def resolved(cls, loaded_config: Loaded, vocab_size: int) -> Any:
        """Return the shape that the config describes, for a tokenizer of this size.

        Raises:
            ConfigError: lists every mistake in the shape.
        """

    @classmethod
    def prepare(cls, loaded_config: Loaded, world_size: int, say: Say) -> None:
        config = _text(loaded_config.config)
        sets = config.eval.sets
        data.create_dataset_files(config.data, config.data_seed, world_size, say, sets)
        if config.data.kind == "chat":
            for remark in data.lost_conversations(config.data, config.data_seed, config.context):
                say(f"note: {remark}")

    @classmethod
    def open(cls, loaded_config: Loaded, world_size: int) -> Self:
        config = _text(loaded_config.config)
        dataset = data.open_data(config.data, config.data_seed, world_size)
        sets = data.open_sets(config.data, config.data_seed, config.eval.sets)
        shape = cls.resolved(loaded_config, dataset.vocab_size)
        spec = cls(config, shape, dataset.train_tokens, dataset, sets)
        if spec.token_bytes is None and (key := _asks_for_bytes(config)):
            raise ConfigError(
                loaded_config.problem(
                    key,
                    f"{key}: {BITS_PER_BYTE} is not known of this tokenizer: how many bytes of text a "
                    "token stands for is known of byte, char and byte-level BPE",
                    "use loss",
                )
            )
        context = config.context
        dataset.held_out("val", config.eval.context or context)
        dataset.check_transform(context)
        samples = dataset.train_samples(context)
        if samples is not None and samples < world_size:
            raise ConfigError(
                loaded_config.problem(
                    "data.source",
                    f"{world_size} ranks, but only {samples} training samples of {context} tokens",
                    "use fewer ranks, a smaller model.context or more text",
                )
            )
        return spec

    @classmethod
    def assume(cls, loaded_config: Loaded, say: Say, world_size: int = 1) -> Self:
        """See `TaskSpec`: the vocabulary of data that are missing is assumed."""
        config = _text(loaded_config.config)
        missing = data.missing(config.data, config.data_seed, say, config.eval.sets)
        if not missing:
            return cls.open(loaded_config, world_size)
        tokenizer = named_tokenizer(config.data.tokenizer, config.data.bos, config.data.eos)
        if tokenizer is None:
            largest = config.data.vocab_size if config.data.tokenizer == "bpe" else _BYTES
            # what a text makes of it may be smaller, as whoever set the model's rows, or the run itself, knows
            vocabulary = min(largest, getattr(config.model, "vocab_size", None) or largest)
        else:
            vocabulary = tokenizer.vocab_size
        say(
            f"no data in {', '.join(map(str, missing))} yet, which a run would prepare: a vocabulary "
            f"of {vocabulary:,} is assumed"
        )
        return cls(config, cls.resolved(loaded_config, vocabulary), lambda _: None)

    def fp32_reason(self, device: str) -> str:
        if device != "cpu":
            return ""
        if not has_bf16_units():
            return "this processor has no bf16 units, or ONEDNN_MAX_CPU_ISA hides them"
        # of the config, so that all numbers of ranks train in the same precision
        width = self.architecture.sizes()["embed"]
        tokens = self.config.train.batch_size * self.config.context
        if not bf16_pays(width, tokens):
            return f"products of {tokens:,} tokens with {width} × {width} weights are too small for bf16"
        return ""

    @cached_property
    def token_bytes(self) -> NDArray[np.int64] | None:
        """Bytes of text of each token; None if unknown, or if the data are not prepared."""
        dataset = self.dataset
        return None if dataset is None else token_bytes(load_saved_tokenizer(dataset.path))

    @property
    def opened(self) -> DataSet:
        """The data, which must be prepared."""
        assert self.dataset is not None
        return self.dataset

    @property
    def derived(self) -> dict[str, object]:
        values: dict[str, object] = {}
        if self.dataset is not None and not self.config.data.mixture:  # parts each have a folder
            values["data.path"] = str(self.dataset.path)
        if self.dataset is not None and folder_of(self.config.data.tokenizer) is not None:
            values |= _around(self.config.data, load_saved_tokenizer(self.dataset.path))
        # by the longest samples that a ramp of the context leads to
        longest = max(self.config.full_context, self.config.eval.context or 0)
        values["eval.batch_size"] = max(1, EVAL_TOKENS // longest)
        return values

    @property
    def run_files(self) -> dict[str, Path]:
        """The tokenizer's files, and those beside it that belong to an export."""
        names = tokenizer_files(load_saved_tokenizer(self.opened.path))
        of_tokenizer = {name: self.opened.path / name for name in names}
        folder, files = folder_of(self.config.data.tokenizer), dict[str, Path]()
        if folder is not None:
            files = {name: folder / name for name in COMPANIONS}
            # of an imported run, or of a folder of transformers
            ids = folder / SPECIAL_IDS
            files[SPECIAL_IDS] = ids if ids.is_file() else folder / CONFIG
        if self.config.data.chat_template is not None:
            files[CHAT_TEMPLATE] = Path(self.config.data.chat_template)
        return of_tokenizer | {name: file for name, file in files.items() if file.is_file()}

    def train(self, context: int, seed: int) -> tuple[Source, Order]:
        return self.opened.train(context, seed)

    def held_out(self, split: str, context: int) -> Source:
        if split in self.sets:
            return self.opened.windows_of(self.sets[split], "val", context)
        return self.opened.held_out(split, context)

    @property
    def fingerprints(self) -> dict[str, str]:
        dataset = self.opened
        return {"data": dataset.fingerprint, "tokenizer": dataset.tokenizer_fingerprint}

    def samples(self, context: int) -> int | None:
        tokens = self.tokens(context)
        return None if tokens is None else windows_of(tokens, context)

    def split_sizes(self, context: int) -> dict[str, int | None]:
        length = self.config.eval.context or context
        of_sets: dict[str, int | None] = {
            name: len(self.held_out(name, length)) for name in self.sets
        }
        return {} if self.dataset is None else super().split_sizes(context) | of_sets

    @property
    def drawing(self) -> str:
        return "" if self.dataset is None else self.dataset.drawing

    def weight(self, context: int) -> float:
        return self._targets(context).mean

    def weight_remark(self, context: int) -> str:
        return self._targets(context).remark

    def _targets(self, context: int) -> TargetCount:
        if context not in self._counts:
            self._counts[context] = (
                data.unread_targets(self.config.data, context)
                if self.dataset is None
                else self.dataset.targets(context)
            )
        return self._counts[context]

    def units(self, context: int) -> int | None:
        return self.tokens(context)

    def flops(self, architecture: TransformerShape, context: int) -> int:
        return flops_per_token(architecture, context)

    def computed_units(self, context: int) -> float:
        """See `TaskSpec`: all tokens of a sample, also those of prompts, which are no targets."""
        return context

    def training_setup(self, context: int, batch_size: int, device: str) -> TrainingSetup:
        """Return what the memory of a step depends on besides the shape; for `precision: auto`, with the likely one of
        a device that is not initialised yet."""
        config, precision = self.config, self.config.precision
        if precision == "auto":
            precision = "fp32" if self.fp32_reason(device) else "bf16"
        return TrainingSetup(
            batch_size=batch_size,
            context=context,
            precision=precision,
            optimizer=config.optimizer,
            ema=config.train.ema is not None,
            gradient_checkpointing=config.train.gradient_checkpointing,
            compiled=config.compile,
            device=device,
            document_masks=config.data.document_masks,
        )


def _asks_for_bytes(config: TextConfig) -> str:
    """Return a key that names the metric bits_per_byte, or an empty string."""
    requests = config.requested_metrics.items()
    return next((key for key, metric in requests if metric.endswith(BITS_PER_BYTE)), "")


def adapter_lines(adapters: Iterable[Lora]) -> list[str]:
    """Describe the adapters of a shape."""
    return [f"{a.target} of rank {a.rank}, alpha {a.alpha:g}" for a in adapters]


def _around(data: DataConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the keys that say what surrounds a document, as the tokenizer and the files beside it do."""
    if data.kind == "chat" or data.tokens_field is not None:
        return {}
    tokens = {"data.bos": getattr(tokenizer, "bos", None)}
    if tokenizer.after.tolist() in ([], [tokenizer.end_id]):
        tokens["data.eos"] = tokenizer.end_token
    return {key: token for key, token in tokens.items() if token is not None}


def _text(config: RunConfig) -> TextConfig:
    assert isinstance(config, TextConfig)
    return config


SAMPLE_TEMPERATURE, SAMPLE_TOP_K = 0.8, 50
"""sampling parameters of the text that a run generates during training"""
UNIT_TOKENS = 2048
"""tokens of held-out text per unit of the standard error: neighbouring windows are correlated"""


class TextTask(Task):
    """`Task` of a language model on text. A sample is a window or document, its weight its target tokens."""

    spec: TextSpec
    config: TextConfig

    @property
    def metrics(self) -> Sequence[str]:
        return TEXT_METRICS if self.spec.token_bytes is not None else ("loss",)

    @property
    def held_out_sets(self) -> Mapping[str, int | None]:
        return {entry.name: entry.eval_interval for entry in self.config.eval.sets}

    def held_out_parts(self) -> Mapping[str, range]:
        return self.spec.opened.held_out_parts(self.held_out_context)

    @property
    def cluster(self) -> int:
        return max(1, UNIT_TOKENS // self.held_out_context)

    def places_of(self, batch: Batch) -> dict[str, Tensor]:
        """Return the arguments of a model that tell documents apart, if these are separate."""
        if not self.config.data.document_masks:
            return {}
        positions, sizes = batch["positions"], batch["documents"]
        # on CPUs nothing reads sizes, and a compiled model would be compiled again for another number of documents
        of_gpu = {} if positions.device.type == "cpu" else {"sizes_J": sizes}
        return {"positions_BT": positions, **of_gpu}

    def start_warnings(self, model: Module) -> Sequence[str]:
        """See `Task`: why a GPU masks documents, where its kernel does not compute them apart."""
        if not self.config.data.document_masks:
            return ()
        from instar.models.documents import mask_reasons

        return mask_reasons(model)

    def loss_sum(self, model: Module, batch: Batch) -> Tensor:
        loss: Tensor = model(batch["inputs"], batch["targets"], **self.places_of(batch))
        return loss

    def measure(
        self,
        model: Module,
        batch: Batch,
        *,
        predict: bool = False,  # noqa: ARG002
    ) -> Measured:
        """Return the loss in nats per token and, if the bytes of tokens are known, in bits per byte:
        Σ nats / (ln 2 · Σ bytes), both sums over all targets."""
        import torch

        targets = batch["targets"]
        losses: Tensor = model(batch["inputs"], targets, per_sample=True, **self.places_of(batch))
        mask = targets != IGNORED
        tallies = {"loss": Tally(losses, mask.sum(1))}
        if (token_bytes := self.spec.token_bytes) is not None:
            table = torch.from_numpy(token_bytes).to(targets.device)
            sizes = torch.where(mask, table[targets.clamp(min=0).long()], 0).sum(1)
            tallies[BITS_PER_BYTE] = Tally(losses / math.log(2), sizes)
        return Measured(tallies)

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the perplexity, exp(loss), per token of this tokenizer."""
        loss = metrics["loss"]
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf}

    def outputs(self, model: Module, batch: Batch) -> Tensor:
        logits: Tensor = model(batch["inputs"], **self.places_of(batch))
        return logits

    def loss_and_outputs(self, model: Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Task`; a single forward pass."""
        from instar.models.loss import cross_entropy_sum

        logits_BTV = self.outputs(model, batch)
        return cross_entropy_sum(logits_BTV.flatten(0, 1), batch["targets"].flatten()), logits_BTV

    def sample_text(self, model: Module, tokenizer: Tokenizer, prompt: str, tokens: int) -> str:
        """See `GeneratesText`."""
        import torch

        from instar.models.sampling import LanguageModel, SamplingOptions, generate

        device = next(model.parameters()).device
        start = torch.tensor([prompt_tokens(tokenizer, prompt).tolist()], device=device)
        token_ids = generate(
            cast(LanguageModel, model),
            start,
            tokens,
            SamplingOptions(temperature=SAMPLE_TEMPERATURE, top_k=SAMPLE_TOP_K),
            vocab_size=tokenizer.vocab_size,
            generator=torch.Generator().manual_seed(0),
        )
        return tokenizer.decode(token_ids[0, start.shape[1] :].tolist())
