"""Config sections of language models and their text, and their checks: a GPT, or a model of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from instar.config.errors import ConfigProblem
from instar.config.schema import NAME, Direction, FeedConfig, Name, RunConfig
from instar.config.sections import (
    FROM,
    Context,
    ConvSize,
    Epsilon,
    Experts,
    Fraction,
    Heads,
    LayersOrNone,
    MLPWidth,
    ModelSection,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
    Vocabulary,
    Width,
    subsection,
)

BITS_PER_BYTE = "bits_per_byte"
"""The metric that does not depend on the tokenizer; only where the bytes of each token are known."""

TEXT_METRICS = ("loss", BITS_PER_BYTE)
"""Metrics of an evaluation of text."""

CONTEXT = 1024
"""Default of `model.context`, unless the model can read less."""


class ModelConfig(ModelSection):
    """The shape of the GPT. What is left out is derived when the run starts."""

    n_layer: LayersOrNone = Field(
        4,
        description="number of blocks; 0: none at first; insert_layers with from: normal adds them",
    )
    n_head: Heads = Field(4, description="query heads per block")
    n_kv_head: Heads | None = Field(
        None, description="key and value heads; fewer than n_head is grouped-query attention"
    )
    n_embd: Width = Field(128, description="width of the residual stream")
    head_dim: Width | None = Field(
        None,
        description="channels per head; default n_embd / n_head, which must then be an integer",
    )
    n_mlp: MLPWidth | None = Field(
        None,
        description="MLP width; default 4 × n_embd, or 8/3 × n_embd to a multiple of 32 (swiglu)",
    )
    context: Context = Field(128, description="context length of the model, and tokens per sample")
    vocab_size: Vocabulary | None = Field(
        None, description="rows of the token table; default: the size of the tokenizer's vocabulary"
    )
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="normalisation")
    activation: Literal["gelu", "gelu_tanh", "relu2", "swiglu"] = Field(
        "gelu", description="MLP nonlinearity; gelu_tanh is the approximation OpenAI's GPT-2 used"
    )
    positions: Literal["learned", "rope"] = Field("learned", description="position encoding")
    bias: bool = Field(True, description="biases in linear layers and LayerNorm")
    tied: bool = Field(True, description="output head shares the token table")
    qk_norm: bool = Field(False, description="RMS-normalise queries and keys")
    qk_norm_eps: Epsilon | None = Field(None, description="ε of qk_norm; default: norm_eps")
    conv_size: ConvSize | None = Field(
        None,
        description="tokens that a short causal convolution before the MLP of each block sees; default: none",
    )
    embedding_multiplier: PositiveFloat = Field(
        1.0, description="factor of the token embeddings, but not of a tied head"
    )
    rope_base: PositiveFloat = Field(10000.0, description="RoPE base θ")
    norm_eps: Epsilon = Field(1e-5, description="ε of the normalisations")
    dropout: Fraction = Field(0.0, description="dropout probability")
    num_experts: Experts | None = Field(
        None, description="experts in place of the MLP of each block; default: no experts"
    )
    num_experts_per_tok: Experts | None = Field(
        None, description="experts that each token uses; default 2, or 1 of 1"
    )
    router_aux_loss_coef: NonNegativeFloat = Field(
        0.01, description="weight of the load-balancing loss of the experts' routers in training"
    )


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
    adapter: str | None = Field(
        None,
        description="folder of an adapter that peft saved, with which the model of `from` begins",
    )


class MixturePart(Section):
    """One of several sources that are mixed."""

    source: str = Field(description="as data.source")
    weight: PositiveFloat | None = Field(
        None,
        description="share of the samples that are drawn from it, relative to the other weights; "
        "all parts have one, or none: then each sample comes once an epoch",
    )
    name: str | None = Field(
        None,
        description="name in set_mixture and in logs; default: the source; of several of one name, the later ones are "
        "numbered: web (2)",
    )
    text_field: str | None = Field(None, description="default: data.text_field")
    tokens_field: str | None = Field(None, description="default: data.tokens_field")


def part_names(parts: Sequence[MixturePart]) -> list[str]:
    """Return the name of each part of a mixture; of several of one name, the later ones are numbered: `web (2)`."""
    names: list[str] = []
    for part in parts:
        name = plain = part.name or part.source
        number = 2
        while name in names:
            name, number = f"{plain} ({number})", number + 1
        names.append(name)
    return names


class DataConfig(FeedConfig):
    """Where the samples are, in which order they come, and how they reach the ranks."""

    kind: Literal["tokens", "rows", "stream", "python", "chat"] = Field(
        "tokens",
        description="tokens: text, tokenised once into token shards; rows: a Hugging Face data set, tokenised "
        "once too; stream: a Hugging Face IterableDataset, read from its beginning; python: any iterable, made by "
        "a function; chat: JSON lines with conversations, of which only the assistant's tokens are targets",
    )
    path: str | None = Field(
        None,
        description="folder of token shards; made from `source` if it does not exist "
        "(default: data/<source>-<tokenizer>, named from the fields below); for stream and python "
        "it holds the tokenizer, the held-out text and the counts",
    )
    source: str = Field(
        "stdlib",
        description="text to prepare: stdlib (the Python standard library's own source), or a "
        "file, folder or glob of .txt, .py, .md, .jsonl, .parquet …; rows and stream: files that "
        "`datasets` loads, a folder of `save_to_disk`, or a name on the hub; python: module:function",
    )
    subset: str | None = Field(
        None,
        description="rows, stream: configuration of a hub data set; a part of the training split is data.train_subset",
    )
    source_split: str = Field("train", description="rows, stream: the data set's split to train on")
    mixture: Annotated[tuple[MixturePart, ...], Strict(False)] = Field(
        (), description="tokens, rows: several sources in place of `source`"
    )
    val_source: str | None = Field(
        None,
        description="text that is held out, in place of a share of `source`: a file, folder or "
        "glob; stream and python need one",
    )
    text_field: str = Field("text", description="column or key of the text in rows")
    tokens_field: str | None = Field(
        None, description="rows, stream, python: column of token ids, in place of text"
    )
    if_changed: Literal["refuse", "keep", "prepare"] = Field(
        "refuse",
        description="what a new run does if its sources have changed since its data were prepared: "
        "refuse; keep: use the prepared data; prepare: prepare them again, in a folder beside",
    )
    tokenizer: str = Field(
        "byte",
        description="how text becomes tokens: byte, char, bpe (trained), or a tokenizer.json",
    )
    bos: str | None = Field(
        None,
        description="token before each document, sample text and prompt, of a tokenizer.json; '': none; default: the "
        "one that the file itself adds",
    )
    eos: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="token that ends each document, of a tokenizer.json; default: the one that the files beside it name",
    )
    vocab_size: Vocabulary = Field(4096, description="vocabulary of a trained BPE tokenizer")
    max_bytes: PositiveInt | None = Field(
        None, description="use about this many bytes of the source"
    )
    drop_duplicates: bool = Field(
        False,
        description="tokens, rows, chat: of documents that are equal, use the first, and none that is held out",
    )
    val_fraction: Share = Field(0.05, description="share held out")
    test_fraction: Fraction = Field(0.05, description="share kept for a final test")
    chat_template: str | None = Field(
        None,
        description="chat: file of a jinja template; default: the model's, or else a plain one",
    )
    chat_form: Literal["messages", "sharegpt", "alpaca", "prompt_completion"] = Field(
        "messages",
        description="chat: format of a line: messages (role, content), sharegpt (from, value), alpaca (instruction, "
        "input, output), or prompt_completion (two lists of messages, of which the second is learnt)",
    )
    chat_answers: Literal["all", "last"] = Field(
        "all", description="chat: which answers of a conversation are trained"
    )
    context: Context | None = Field(
        None,
        description="tokens per training sample at the start, which set_context and change_context "
        "change; default: model.context",
    )
    packing: bool = Field(
        True,
        description="rows, stream, python, chat: documents are concatenated and cut into "
        "samples; false: a sample is one document, truncated to the context",
    )
    document_masks: bool = Field(
        False,
        description="tokens, rows, chat: documents in the same sample do not attend to each "
        "other, and positions start again in each",
    )
    lanes: Annotated[int, Field(gt=0, le=2**16)] = Field(
        8,
        description="stream: parts of it that are read side by side, at most one for each shard "
        "of the data set; ranks share them, and the order does not depend on how",
    )

    @property
    def read_from_start(self) -> bool:
        return self.kind in ("stream", "python")


class TextConfig(RunConfig):
    """A whole run of a language model on text."""

    data: DataConfig = subsection(DataConfig, "samples and their order")

    def conflicts(self) -> list[ConfigProblem]:
        return [*data_checks(self.data), *_lengths(self), *_sets(self)]

    @property
    def full_context(self) -> int:
        """`model.context`: tokens per sample, unless `data.context` or `eval.context` is set."""
        raise NotImplementedError

    @property
    def context(self) -> int:
        return self.data.context or self.full_context

    @property
    def metrics(self) -> dict[str, Direction]:
        of_sets = (f"{entry.name}/{name}" for entry in self.eval.sets for name in TEXT_METRICS)
        of_parts = (f"{name}/loss" for name in self.held_out_parts)
        return dict.fromkeys((*TEXT_METRICS, *of_sets, *of_parts), "min")

    @property
    def held_out_parts(self) -> list[str]:
        """The names of the sources of a mixture whose held-out text the validation split consists of."""
        if self.data.val_source is not None:
            return []
        return part_names(self.data.mixture)

    def rank_conflicts(self, world_size: int) -> list[ConfigProblem]:
        return data_rank_checks(self.data, world_size)


class LanguageConfig(TextConfig):
    """A whole run of a GPT on text."""

    name: Name = Field("gpt", description=NAME)
    model: ModelConfig = subsection(ModelConfig, "the GPT's shape")

    def conflicts(self) -> list[ConfigProblem]:
        of_weights = self.starts_from is not None  # whose shape is not a matter of this config
        return [*([] if of_weights else shape_checks(self.model)), *super().conflicts()]

    @property
    def full_context(self) -> int:
        return self.model.context

    @property
    def longest_context(self) -> int:
        return self.model.context


class CausalLMConfig(TextConfig):
    """A whole run of a causal language model of transformers on text."""

    name: Name = Field("finetune", description=NAME)
    model: PretrainedConfig = subsection(PretrainedConfig, "the model of transformers")

    def conflicts(self) -> list[ConfigProblem]:
        return [*super().conflicts(), *self._model_conflicts()]

    def _model_conflicts(self) -> Iterator[ConfigProblem]:
        if self.starts_from is None and self.model.config is None:
            yield ConfigProblem(
                (f"model.{FROM}", "task"),
                f"model.{FROM} must name the folder of a model of transformers",
                "a model on the hub is downloaded with: hf download NAME --local-dir FOLDER",
            )
        if self.model.adapter is not None and self.starts_from is None:
            yield ConfigProblem(
                ("model.adapter", f"model.{FROM}"),
                f"model.adapter is added to a model: model.{FROM} must name its folder",
            )
        context, longest = self.model.context, self.longest_context
        if context is not None and longest is not None and context > longest:
            text = f"model.context is {context:,}, but the model reads at most {longest:,} tokens"
            yield ConfigProblem(("model.context",), text)

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


def _lengths(config: TextConfig) -> Iterator[ConfigProblem]:
    """Yield samples that are longer than what the model can read at step 0."""
    longest = config.longest_context
    for key, size in (("data.context", config.data.context), ("eval.context", config.eval.context)):
        if size is not None and longest is not None and size > longest:
            yield ConfigProblem(
                (key, "model.context"),
                f"{key} is {size:,}, but the model reads at most {longest:,} tokens",
            )


def _sets(config: TextConfig) -> Iterator[ConfigProblem]:
    """Yield held-out sets whose metrics would have the names of others, or that no evaluation is due for."""
    names, parts = [entry.name for entry in config.eval.sets], config.held_out_parts
    for number, entry in enumerate(config.eval.sets):
        key = f"eval.sets[{number}]"
        if entry.name in ("train", "val", "test") or entry.name in names[:number]:
            text = f"{key}.name: there is another {entry.name!r} in records"
            yield ConfigProblem((f"{key}.name", "eval.sets"), text, "give it another name")
        elif entry.name in parts:
            text = f"{key}.name: a part of data.mixture has the name {entry.name!r}"
            yield ConfigProblem((f"{key}.name", "data.mixture"), text, "give it another name")
        every = config.eval.eval_interval
        if entry.eval_interval is not None and config.eval.eval_epochs is not None:
            text = f"{key}.eval_interval counts steps, and eval.eval_epochs epochs"
            yield ConfigProblem((f"{key}.eval_interval", "eval.eval_epochs"), text, "leave it out")
        elif entry.eval_interval is not None and entry.eval_interval % every:
            text = f"{key}.eval_interval ({entry.eval_interval}) must be a multiple of eval.eval_interval ({every})"
            yield ConfigProblem((f"{key}.eval_interval", "eval.eval_interval"), text)


_FUNCTION = re.compile(r"[\w.]+:[\w.]+")


def shape_checks(model: ModelConfig) -> Iterator[ConfigProblem]:
    """Yield sizes that are not divisible as required."""
    heads, width = model.n_head, model.n_embd
    if model.head_dim is not None:
        if model.positions == "rope" and model.head_dim % 2:
            yield ConfigProblem(
                ("model.head_dim", "model.positions"),
                f"rope turns pairs of channels: model.head_dim must be even, got {model.head_dim}",
            )
    elif width % heads:
        multiple = max(heads, round(width / heads) * heads)
        yield ConfigProblem(
            ("model.n_embd", "model.n_head"),
            f"model.n_embd ({width}) must be divisible by model.n_head ({heads})",
            f"n_embd {multiple} would be",
        )
    elif model.positions == "rope" and (width // heads) % 2:
        yield ConfigProblem(
            ("model.n_embd", "model.n_head", "model.positions"),
            f"rope turns pairs of channels: model.n_embd / model.n_head must be even, "
            f"got {width} / {heads} = {width // heads}",
        )
    number, per_token = model.num_experts, model.num_experts_per_tok
    if per_token is not None and (number is None or per_token > number):
        yield ConfigProblem(
            ("model.num_experts_per_tok", "model.num_experts"),
            f"model.num_experts_per_tok ({per_token}) must be at most model.num_experts "
            f"({'which is not set' if number is None else number})",
        )
    if model.n_kv_head is not None and heads % model.n_kv_head:
        yield ConfigProblem(
            ("model.n_kv_head", "model.n_head"),
            f"model.n_head ({heads}) must be divisible by model.n_kv_head ({model.n_kv_head})",
        )


def data_checks(data: DataConfig) -> list[ConfigProblem]:
    """Return the conflicts within the section."""
    parts = (_source, _subset, _splits, _reading, _conversations, _mixture)
    return [problem for part in parts for problem in part(data)]


def data_rank_checks(data: DataConfig, world_size: int) -> list[ConfigProblem]:
    """Return the conflicts of the section with a number of ranks."""
    if data.strategy == "dispatched" or world_size == 1:
        return []
    if data.kind == "python":
        keys = "data.strategy", "data.kind"
        text = f"a Python iterable can be read by rank 0 only, not by each of {world_size} ranks"
        return [ConfigProblem(keys, text, "say data.strategy: dispatched")]
    if data.kind == "stream" and data.lanes < world_size:
        keys = "data.lanes", "data.strategy"
        text = f"{world_size} ranks cannot share {data.lanes} lanes: each reads whole ones"
        hint = f"say data.lanes: {world_size} or a multiple, or data.strategy: dispatched"
        return [ConfigProblem(keys, text, hint)]
    return []


def _source(data: DataConfig) -> Iterator[ConfigProblem]:
    kind = data.kind
    if kind == "python" and not _FUNCTION.fullmatch(data.source):
        yield ConfigProblem(
            ("data.source", "data.kind"),
            f"data.source of kind python names a function, not {data.source!r}",
            "e.g. my_package.my_module:samples",
        )
    elif kind in ("rows", "stream", "chat") and data.source == "stdlib" and not data.mixture:
        yield ConfigProblem(
            ("data.source", "data.kind", "data.mixture"),
            f"data.source of kind {kind} must be given: files, a folder"
            + (" or a name on the hub" if kind != "chat" else " or a glob"),
        )
    if data.mixture and data.source != "stdlib":
        yield ConfigProblem(
            ("data.source", "data.mixture"),
            "data.source is not read where data.mixture names the sources",
            "name it as a part of data.mixture, or leave one of them out",
        )
    if kind in ("tokens", "python", "chat") and (data.subset or data.source_split != "train"):
        key = "data.subset" if data.subset else "data.source_split"
        yield ConfigProblem(
            (key, "data.kind"),
            f"{key} selects from a Hugging Face data set, and kind {kind} reads none",
            "use kind rows or stream, or leave it out",
        )
    if kind in ("tokens", "chat") and data.tokens_field is not None:
        yield ConfigProblem(
            ("data.tokens_field", "data.kind"),
            f"data.tokens_field names a column of rows, and kind {kind} prepares text",
            "say data.kind: rows",
        )
    if kind not in ("tokens", "rows", "chat") and data.drop_duplicates:
        yield ConfigProblem(
            ("data.drop_duplicates", "data.kind"),
            f"data.drop_duplicates compares prepared documents, and kind {kind} has none",
        )
    if kind != "tokens" and data.max_bytes is not None:
        yield ConfigProblem(
            ("data.max_bytes", "data.kind"),
            f"data.max_bytes limits what kind tokens prepares; kind {kind} reads its source as it is",
        )


def _subset(data: DataConfig) -> Iterator[ConfigProblem]:
    """Yield reasons why no part of the training split can be chosen."""
    if data.train_subset is None:
        return
    if data.read_from_start:
        yield ConfigProblem(
            ("data.train_subset", "data.kind"),
            f"data.train_subset chooses from data with an index, and kind {data.kind} is read from its beginning",
            "use kind rows, or let the source end earlier",
        )
    if data.mixture and isinstance(data.train_subset, int):
        yield ConfigProblem(
            ("data.train_subset", "data.mixture"),
            "data.train_subset must be a share where data.mixture has several sources, of each of which it is taken",
            "a share below 1",
        )
    if data.document_masks and data.kind == "tokens":
        yield ConfigProblem(
            ("data.train_subset", "data.document_masks"),
            "data.train_subset cuts kind tokens anywhere, and data.document_masks needs documents that are not cut",
            "say data.kind: rows, or leave one of them out",
        )


def _splits(data: DataConfig) -> Iterator[ConfigProblem]:
    share = data.val_fraction + data.test_fraction
    if share >= 1:
        yield ConfigProblem(
            ("data.val_fraction", "data.test_fraction"),
            f"data.val_fraction + data.test_fraction must be less than 1, got {share:g}: "
            "no training data would be left",
        )
    if data.read_from_start and data.val_source is None:
        yield ConfigProblem(
            ("data.val_source", "data.kind"),
            f"kind {data.kind} cannot be split: data.val_source must name the held-out text",
            "a file, folder or glob of text",
        )


def _reading(data: DataConfig) -> Iterator[ConfigProblem]:
    kind = data.kind
    if data.read_from_start and data.order in ("random", "blocks"):
        yield ConfigProblem(
            ("data.order", "data.kind"),
            f"data.order {data.order} needs random access, and kind {kind} is read from its beginning",
            "use sequential, or shuffled (within data.shuffle_window)",
        )
    if data.order == "random" and not data.packing:
        yield ConfigProblem(
            ("data.order", "data.packing"),
            "data.order random draws windows of packed text, and data.packing is false",
        )
    for key, token in (("data.bos", data.bos), ("data.eos", data.eos)):
        if token is not None and (reason := _no_token(data)):
            yield ConfigProblem(
                (key, "data.tokenizer", "data.kind"), f"{key}: {reason}", "leave it out"
            )
    if kind == "tokens" and not data.packing:
        yield ConfigProblem(
            ("data.packing", "data.kind"),
            "token shards hold text end to end: data.packing false needs rows",
            "say data.kind: rows",
        )
    if data.document_masks and (why := _no_masks(data)):
        keys, text, hint = why
        yield ConfigProblem(("data.document_masks", *keys), f"data.document_masks: {text}", hint)
    if data.read_from_start and data.tokenizer in ("char", "bpe"):
        yield ConfigProblem(
            ("data.tokenizer", "data.kind"),
            f"a {data.tokenizer} tokenizer must be trained first, and kind {kind} is not read before "
            "the run trains",
            "use byte, or the path of a tokenizer.json",
        )
    if data.workers and kind == "python":
        yield ConfigProblem(
            ("data.workers", "data.kind"),
            "an iterable is read by one process: data.workers must be 0 with kind python",
        )


def _conversations(data: DataConfig) -> Iterator[ConfigProblem]:
    kind = data.kind
    if kind == "chat" and data.order == "random":
        yield ConfigProblem(
            ("data.order", "data.kind"),
            "data.order random draws windows of text, and kind chat has samples of its own",
            "use shuffled",
        )
    if kind == "chat" and data.tokenizer in ("byte", "char", "bpe"):
        yield ConfigProblem(
            ("data.tokenizer", "data.kind"),
            f"kind chat needs the tokenizer.json of a model, not {data.tokenizer}",
        )
    if kind != "chat" and data.chat_template is not None:
        yield ConfigProblem(
            ("data.chat_template", "data.kind"),
            f"data.chat_template renders conversations, and kind {kind} has none",
            "say data.kind: chat",
        )
    for key, is_set in (
        ("data.chat_form", data.chat_form != "messages"),
        ("data.chat_answers", data.chat_answers != "all"),
    ):
        if is_set and kind != "chat":
            yield ConfigProblem(
                (key, "data.kind"),
                f"{key} is of conversations, and kind {kind} has none",
                "say data.kind: chat",
            )


def _no_masks(data: DataConfig) -> tuple[tuple[str, ...], str, str] | None:
    """Return the keys because of which packed documents cannot be told apart, why, and what to do; None: they can."""
    if not data.packing:
        return (
            ("data.packing",),
            "with data.packing false, a sample is one document",
            "leave it out",
        )
    if data.read_from_start:
        text = f"kind {data.kind} is not read so"
        return ("data.kind",), text, "use tokens or rows, or data.packing: false"
    if data.kind == "chat" and data.transform is not None:
        text = "what data.transform makes of a sample says nothing of where conversations begin"
        return ("data.transform",), text, "leave one of them out"
    if data.tokenizer in ("byte", "char") or data.tokenizer.endswith(".pkl"):
        text = f"the tokenizer {data.tokenizer} has no token that ends a document"
        return ("data.tokenizer",), text, "use bpe, or a tokenizer.json with such a token"
    return None


def _no_token(data: DataConfig) -> str:
    """Return why no token of the tokenizer surrounds a document; empty: one may."""
    if data.tokenizer in ("byte", "char", "bpe"):
        return f"the tokenizer {data.tokenizer} has no tokens that begin or end a text by name"
    if data.kind == "chat":
        return "the chat template says what surrounds a conversation"
    if data.tokens_field is not None:
        return "data.tokens_field holds token ids, to which nothing is added"
    return ""


def _mixture(data: DataConfig) -> Iterator[ConfigProblem]:
    if not data.mixture:
        return
    if data.kind not in ("tokens", "rows"):
        yield ConfigProblem(
            ("data.mixture", "data.kind"),
            f"sources of kind {data.kind} cannot be mixed: they are read from their beginning",
            "use rows, or tokens",
        )
    without = [number for number, part in enumerate(data.mixture) if part.weight is None]
    if 0 < len(without) < len(data.mixture):
        key = f"data.mixture[{without[0]}]"
        yield ConfigProblem(
            (key, "data.mixture"),
            "either all parts of data.mixture have a weight, or none",
            f"{key} has none",
        )
    if data.tokenizer in ("char", "bpe"):
        yield ConfigProblem(
            ("data.tokenizer", "data.mixture"),
            f"a {data.tokenizer} tokenizer would be trained on each part of data.mixture anew",
            "train one with `instar data prepare`, and name its tokenizer.json; or use byte",
        )
    if data.order in ("random", "blocks"):
        yield ConfigProblem(
            ("data.order", "data.mixture"),
            f"data.order {data.order} is of one source; those of a mixture are shuffled or sequential",
        )
