"""What a config file may say: frozen models, one per section, torch-free.

Every field carries its description; `instar init`, `instar config schema` and the error
messages are made from them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from instar.config.schedule import ScheduledOperation
from instar.config.section import Fraction, PositiveFloat, PositiveInt, Section, Texts


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


class DataConfig(Section):
    """Where the samples are, in which order they come, and how they reach the ranks."""

    kind: Literal["tokens", "rows", "stream", "python"] = Field(
        "tokens",
        description="tokens: `source` is prepared once into token shards; rows: a Hugging Face data "
        "set, read at any place, tokenised on the way; stream: a Hugging Face IterableDataset, read "
        "from its beginning; python: any iterable, made by a function",
    )
    strategy: Literal["sharded", "dispatched"] = Field(
        "sharded",
        description="sharded: each rank reads its own samples; dispatched: rank 0 reads and sends",
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
    order: Literal["shuffled", "sequential", "random", "blocks"] = Field(
        "shuffled",
        description="shuffled without replacement, sequential, random windows with replacement, or "
        "blocks: shuffled so that what is read together lies together; a stream is shuffled within "
        "shuffle_window",
    )
    block_samples: PositiveInt = Field(
        256, description="order blocks: neighbouring samples that are read together"
    )
    shuffle_window: PositiveInt = Field(
        4096, description="order blocks, and streams: samples that are shuffled among each other"
    )
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
    workers: Annotated[int, Field(ge=0)] = Field(
        0, description="processes of each reading rank that read and tokenise; 0: the rank itself"
    )
    transform: str | None = Field(
        None,
        description="module:function(sample, generator) → sample, applied to every training sample; "
        "the generator comes from (seed, epoch, sample)",
    )
    prefetch: bool = Field(True, description="prepare the next steps' batches in the background")


class TrainConfig(Section):
    """How much of what one step does, and when to stop."""

    until: Texts = Field(
        ("2000it",),
        description="budget: 2000it (steps), 50Mtok, 3ep (epochs), 10min, loss<3.0; the first one met ends the run",
    )
    batch_size: PositiveInt = Field(16, description="samples of one micro-batch")
    gradient_accumulation_steps: PositiveInt = Field(
        1, description="micro-batches of one step over all ranks: global batch = batch_size × this"
    )
    clip: PositiveFloat | None = Field(1.0, description="largest gradient norm; null: no clipping")
    max_skipped_steps: PositiveInt = Field(
        8, description="stop after so many consecutive steps with a non-finite gradient"
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="decay of an exponential moving average of the weights, e.g. 0.999"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute blocks in the backward pass: less memory, more time"
    )


class OptimizerConfig(Section):
    """How a gradient becomes an update."""

    name: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw, or muon for the blocks' matrices and adamw for the rest"
    )
    lr: PositiveFloat = Field(1e-3, description="peak learning rate (AdamW)")
    muon_lr: PositiveFloat = Field(0.02, description="peak learning rate of Muon's matrices")
    beta1: Fraction = Field(0.9, description="AdamW's first-moment decay")
    beta2: Fraction = Field(0.95, description="AdamW's second-moment decay")
    eps: PositiveFloat = Field(1e-8, description="AdamW's ε")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.1, description="decoupled weight decay")
    no_decay: Texts = Field(
        ("*.bias", "*norm*", "*embedding*"),
        description="parameter-name patterns that are not decayed",
    )
    momentum: Fraction = Field(0.95, description="Muon's momentum")
    ns_steps: PositiveInt = Field(5, description="Muon's orthogonalisation steps")
    ns_iteration: Literal["quintic", "polar_express"] = Field(
        "quintic",
        description="Muon's orthogonalisation: quintic Newton–Schulz (5 steps), or Polar Express, "
        "which gets as far in 3",
    )


class LearningRateConfig(Section):
    """The learning rate's course over the steps; its height is optimizer.lr."""

    shape: Literal["cosine", "wsd", "constant"] = Field(
        "cosine",
        description="cosine, wsd (warm-up, stable, linear decay) or constant, each after a linear warm-up",
    )
    warmup_iters: Annotated[int, Field(ge=0)] = Field(100, description="steps of linear warm-up")
    lr_decay_iters: PositiveInt | None = Field(
        None, description="step at which the decay ends; default: the budget of train.until"
    )
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2, description="wsd: share of lr_decay_iters spent decaying"
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="lowest rate as a share of the peak"
    )


class EvalConfig(Section):
    """Held-out loss: exact, over all ranks."""

    eval_interval: PositiveInt = Field(250, description="steps between evaluations")
    eval_iters: PositiveInt | None = Field(
        None, description="so many fixed batches of batch_size; default: the whole validation set"
    )
    batch_size: PositiveInt | None = Field(
        None, description="samples at once in an evaluation; default: as many as make 8,192 tokens"
    )
    at_start: bool = Field(False, description="also evaluate before the first step")


class RecordConfig(Section):
    """What is written down, and how often."""

    log_interval: PositiveInt = Field(10, description="steps between lines on the display")
    analyze_every: PositiveInt | None = Field(
        None,
        description="steps between analyses beside training: effective ranks, attention entropy, "
        "change since the last one, and what they suggest",
    )
    out_dir: str = Field("runs", description="folder in which the run's own folder is made")
    run_dir: str | None = Field(
        None, description="the run's own folder; default: <out_dir>/<name>-<id>"
    )


class CheckpointConfig(Section):
    """When a run is saved, what of it, and which checkpoints stay."""

    every_steps: PositiveInt | None = Field(None, description="save every so many steps")
    every_tokens: PositiveInt | None = Field(None, description="save every so many tokens")
    every_minutes: PositiveFloat | None = Field(
        10.0, description="save when so many minutes have passed since the last save"
    )
    on_best: bool = Field(
        False, description="save whenever the validation loss is the lowest so far"
    )
    on_growth: bool = Field(True, description="save after every operation that changes the model")
    asynchronous: bool = Field(
        True,
        description="write in the background while training goes on; what a stop, a signal or the "
        "end saves is always waited for",
    )
    keep_last: PositiveInt = Field(3, description="how many of those saved last stay")
    keep_best: Annotated[int, Field(ge=0)] = Field(
        1, description="how many with the lowest validation loss stay"
    )
    keep_every: PositiveInt | None = Field(
        None, description="checkpoints whose step is a multiple of this stay for ever"
    )
    save_optimizer_state: bool = Field(True, description="moments of the optimizer")
    save_scheduler_state: bool = Field(
        True, description="the place in the learning rate's course and the operations done"
    )
    save_dataset_state: bool = Field(True, description="the cursor: the place in the data")
    save_rng_state: bool = Field(True, description="each rank's random generators")


class DDPConfig(Section):
    """Options of DistributedDataParallel."""

    bucket_cap_mb: PositiveFloat = Field(25.0, description="size of a gradient bucket, MiB")
    find_unused_parameters: bool = Field(False, description="for models that skip parameters")
    static_graph: bool = Field(False, description="the graph never changes between steps")
    gradient_as_bucket_view: bool = Field(True, description="gradients live inside the buckets")
    broadcast_buffers: bool = Field(False, description="send rank 0's buffers at every forward")


class ElasticConfig(Section):
    """What `reproducible: elastic` holds fixed while the number of ranks changes."""

    virtual_ranks: PositiveInt = Field(
        4,
        description="slices that every step is cut into, a power of two; "
        "as many ranks or 2, 4, 8 … times fewer share them",
    )
    threads: PositiveInt = Field(
        1, description="CPU threads of each rank: other numbers of them round otherwise"
    )


class DistributedConfig(Section):
    """Ranks and how they talk."""

    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="auto: nccl on GPUs, gloo on CPUs"
    )
    timeout_s: PositiveFloat = Field(
        600.0,
        description="longest wait for a rank that is alive, seconds: preparing data, compiling and "
        "saving must each fit in it; then all end, and the one that did not come is named",
    )
    silence_s: PositiveFloat = Field(
        60.0,
        description="a rank without a sign of life for so long is taken for dead, seconds; at most "
        "timeout_s counts",
    )
    ddp: DDPConfig = Field(default_factory=DDPConfig, description="DistributedDataParallel")
    elastic: ElasticConfig = Field(
        default_factory=ElasticConfig, description="for reproducible: elastic"
    )


class RunConfig(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        "gpt", description="the run's name, the first part of its folder's"
    )
    preset: Texts | str = Field(
        (), description="ready-made settings under this file's: gpt2, llama, plain, fast"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        1337, description="all randomness comes from it"
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = Field(
        "auto", description="auto, cpu, cuda or cuda:<index>"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="of the forward pass; weights stay fp32"
    )
    compile: bool = Field(False, description="torch.compile the model")
    reproducible: Literal["fixed", "elastic"] = Field(
        "fixed",
        description="bit for bit: fixed, with the same number of ranks and threads; elastic, with "
        "any number of ranks that shares distributed.elastic.virtual_ranks",
    )
    task: Literal["language"] = Field("language", description="what is trained")
    schedule: Annotated[tuple[ScheduledOperation, ...], Strict(False)] = Field(
        (),
        description="operations that change the run while it runs, in their order: a list, or the "
        "path of a YAML or JSON file with it",
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="the GPT's shape")
    data: DataConfig = Field(default_factory=DataConfig, description="samples and their order")
    train: TrainConfig = Field(default_factory=TrainConfig, description="steps and budget")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="the update")
    learning_rate: LearningRateConfig = Field(
        default_factory=LearningRateConfig, description="the rate's course"
    )
    eval: EvalConfig = Field(default_factory=EvalConfig, description="held-out loss")
    record: RecordConfig = Field(default_factory=RecordConfig, description="what is written down")
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="when to save, and what stays"
    )
    resume: Literal["never", "auto"] = Field(
        "never",
        description="auto: go on with the run in record.run_dir if there is one, else begin it",
    )
    distributed: DistributedConfig = Field(
        default_factory=DistributedConfig, description="ranks and how they talk"
    )
