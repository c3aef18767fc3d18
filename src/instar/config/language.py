"""What a config of a language run says of its model and its text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from instar.config.clash import Clash
from instar.config.schema import NAME, FeedConfig, Name, RunConfig
from instar.config.section import Fraction, PositiveFloat, PositiveInt, Section


class ModelConfig(Section):
    """The shape of the GPT. What is left out is derived when the run starts."""

    n_layer: PositiveInt = Field(4, description="number of blocks")
    n_head: PositiveInt = Field(4, description="query heads per block")
    n_kv_head: PositiveInt | None = Field(
        None, description="key and value heads; fewer than n_head is grouped-query attention"
    )
    n_embd: PositiveInt = Field(128, description="width of the residual stream")
    n_mlp: PositiveInt | None = Field(
        None,
        description="MLP width; default 4 × n_embd, or 8/3 × n_embd to a multiple of 32 (swiglu)",
    )
    context: PositiveInt = Field(
        128, description="tokens the model looks back on, and of one sample"
    )
    vocab_size: PositiveInt | None = Field(
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
    rope_base: PositiveFloat = Field(10000.0, description="RoPE base θ")
    norm_eps: PositiveFloat = Field(1e-5, description="ε of the normalisations")
    dropout: Fraction = Field(0.0, description="dropout probability")


class MixturePart(Section):
    """One of several sources that are mixed."""

    source: str = Field(description="as data.source")
    weight: PositiveFloat | None = Field(
        None,
        description="share of the samples that are drawn from it, relative to the other weights; "
        "all parts have one, or none: then each sample comes once an epoch",
    )
    text_field: str | None = Field(None, description="default: data.text_field")
    tokens_field: str | None = Field(None, description="default: data.tokens_field")


class DataConfig(FeedConfig):
    """Where the samples are, in which order they come, and how they reach the ranks."""

    kind: Literal["tokens", "rows", "stream", "python"] = Field(
        "tokens",
        description="tokens: `source` is prepared once into token shards; rows: a Hugging Face data "
        "set, read at any place, tokenised on the way; stream: a Hugging Face IterableDataset, read "
        "from its beginning; python: any iterable, made by a function",
    )
    path: str | None = Field(
        None,
        description="folder of token shards; made from `source` if it is not there yet "
        "(default: data/<source>-<tokenizer>, named from the fields below); for other kinds it "
        "holds the tokenizer, what is held out and what was counted",
    )
    source: str = Field(
        "stdlib",
        description="text to prepare: stdlib (the Python standard library's own source), or a "
        "file, folder or glob of .txt, .py, .md, .jsonl, .parquet …; rows and stream: files that "
        "`datasets` loads, a folder of `save_to_disk`, or a name on the hub; python: module:function",
    )
    subset: str | None = Field(None, description="rows, stream: configuration of a hub data set")
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
    tokenizer: str = Field(
        "byte",
        description="how text becomes tokens: byte, char, bpe (trained), or a tokenizer.json",
    )
    vocab_size: PositiveInt = Field(4096, description="vocabulary of a trained BPE tokenizer")
    max_bytes: PositiveInt | None = Field(None, description="use only about so much of the source")
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(0.05, description="share held out")
    test_fraction: Fraction = Field(0.05, description="share kept for a final test")
    packing: bool = Field(
        True,
        description="rows, stream, python: documents end to end, cut into samples; false: a sample "
        "is one document, cut off after the context",
    )
    lanes: PositiveInt = Field(
        8,
        description="stream: parts of it that are read side by side, as many as the data set has "
        "shards at most; sharded ranks share them, and the order does not depend on how",
    )

    @property
    def read_from_start(self) -> bool:
        return self.kind in ("stream", "python")


class LanguageConfig(RunConfig):
    """A whole run of a GPT on text."""

    name: Name = Field("gpt", description=NAME)
    model: ModelConfig = Field(default_factory=ModelConfig, description="the GPT's shape")
    data: DataConfig = Field(default_factory=DataConfig, description="samples and their order")

    def clashes(self) -> list[Clash]:
        from instar.config.language_checks import data_checks, shape_checks

        return [*shape_checks(self.model), *data_checks(self.data)]

    def rank_clashes(self, world_size: int) -> list[Clash]:
        from instar.config.language_checks import data_rank_checks

        return data_rank_checks(self.data, world_size)

    @property
    def context(self) -> int:
        return self.model.context
