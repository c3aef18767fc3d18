"""Config sections common to all runs: frozen pydantic models, one per section, torch-free.

A task adds its `model` and `data` sections (`config/language.py`; an extension's or a custom task's own). Every
field has a description, from which `instar init`, `instar config schema` and error messages are generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, Field, Strict, model_validator

from instar.config.budget import meant_number
from instar.config.errors import ConfigProblem
from instar.config.sections import (
    FROM,
    LARGEST,
    MOST_PROCESSES,
    Batch,
    Context,
    Epsilon,
    Fraction,
    Layers,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Ranks,
    Rate,
    RecordConfig,
    ScheduledOperation,
    Score,
    Seconds,
    Section,
    Seed,
    Share,
    Texts,
    Width,
    subsection,
    with_fields,
)
from instar.config.torch_optim.optimizers import defaults_of
from instar.config.torch_optim.schedulers import SCHEDULERS
from instar.extensions import load_target, sections_in

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
NAME = "name of the run, and first part of its folder's name"
Device = Annotated[int, Field(ge=0, le=MOST_PROCESSES)]
Direction = Literal["min", "max"]
OptimizerName = Literal[
    "adamw",
    "muon",
    "sgd",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "asgd",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
]
Shape = Literal[
    "cosine",
    "linear",
    "wsd",
    "step",
    "exponential",
    "constant",
    "StepLR",
    "MultiStepLR",
    "ConstantLR",
    "LinearLR",
    "ExponentialLR",
    "PolynomialLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "OneCycleLR",
    "CyclicLR",
]
MUONS = ("muon_lr", "ns_steps", "ns_iteration")
"""Keys of `optimizer` that Muon alone reads."""
SaveUnit = Literal["steps", "tokens", "epochs"]


S = TypeVar("S", bound=BaseModel)


def extend_section(
    section: type[S], sections: Mapping[str, tuple[type[BaseModel], str]]
) -> type[S]:
    """Return a config class with more sections, given with their descriptions."""
    fields = {name: (kind, subsection(kind, text)) for name, (kind, text) in sections.items()}
    return with_fields(section, fields)


def with_extensions(name: str) -> Callable[[type[S]], type[S]]:
    """Decorate a section of this name with the sections that extensions of Instar add to it."""
    sections = {
        inner: (load_target(spec.target), spec.description)
        for inner, spec in sections_in(name).items()
    }
    return lambda section: extend_section(section, sections) if sections else section


class FeedConfig(Section):
    """Where the samples are, in which order they come, and how they reach the ranks."""

    path: str | None = Field(None, description="folder of the data")
    seed: Seed | None = Field(
        None,
        description="seed of the split, of a tokenizer's training text and of generated samples; default: `seed`, "
        "which also orders the samples. Set it to compare runs of several seeds on the same data",
    )
    strategy: Literal["sharded", "dispatched"] = Field(
        "sharded",
        description="sharded: each rank reads its own samples; dispatched: rank 0 reads and sends",
    )
    order: Literal["shuffled", "sequential", "random", "blocks"] = Field(
        "shuffled",
        description="shuffled without replacement, sequential, random windows with replacement, "
        "or blocks: blocks of neighbouring samples, shuffled; a stream is shuffled within shuffle_window",
    )
    train_subset: PositiveInt | Share | None = Field(
        None,
        description="train on a part of the training split, which data.seed chooses: a share below 1, or a number of "
        "samples (rows: of documents; chat: of conversations; tokens: of tokens)",
    )
    block_samples: PositiveInt = Field(
        256, description="order blocks: number of neighbouring samples that are read together"
    )
    shuffle_window: PositiveInt = Field(
        4096, description="order blocks, and streams: size of the shuffle buffer, samples"
    )
    workers: Annotated[int, Field(ge=0, le=MOST_PROCESSES)] = Field(
        0,
        description="worker processes per reading rank that read and tokenise; 0: in the rank itself",
    )
    transform: str | None = Field(
        None,
        description="module:function(sample, generator) → sample, applied to every training sample; "
        "the generator comes from (seed, epoch, sample)",
    )
    drop_last: bool = Field(
        False,
        description="leave out the last samples of every epoch where they are fewer than a global batch; the "
        "cursor counts them",
    )
    prefetch: bool = Field(
        True,
        description="prepare the next steps' batches in a thread; false: samples are read when a "
        "step needs them, and a stop waits for that",
    )

    @property
    def read_from_start(self) -> bool:
        """Whether the data can only be read sequentially from the beginning."""
        return False


class TrainConfig(Section):
    """Batch size, gradient options and the training budget."""

    until: Texts = Field(
        ("2000it",),
        description="budget: 2000it (steps), 50Mtok, 3ep (epochs), 10min, loss<3.0; the first one met ends the run",
    )
    batch_size: Batch = Field(16, description="samples per micro-batch")
    gradient_accumulation_steps: Batch = Field(
        1, description="micro-batches per step over all ranks: global batch = batch_size × this"
    )
    clip: PositiveFloat | None = Field(1.0, description="maximum gradient norm; null: no clipping")
    max_skipped_steps: PositiveInt = Field(
        8, description="stop after this many consecutive steps with a non-finite gradient"
    )
    ema: Share | None = Field(
        None, description="decay of an exponential moving average of the weights, e.g. 0.999"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute blocks in the backward pass: less memory, more time"
    )


class OptimizerConfig(Section):
    """The optimizer and its hyperparameters."""

    name: OptimizerName = Field(
        "adamw",
        description="adamw, sgd, muon for the blocks' matrices and adamw for the rest, or another of torch.optim, "
        "with torch's defaults: adam, rmsprop, adagrad …",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of the optimizer that no other key names, as torch calls them, e.g. {alpha: 0.9} of "
        "rmsprop",
    )
    lr: Rate = Field(1e-3, description="peak learning rate; of muon for all but its matrices")
    muon_lr: Rate = Field(0.02, description="peak learning rate of Muon's matrices")
    lr_base_width: Width | None = Field(
        None,
        description="width of the residual stream for which the rates were tuned: from there, "
        "those of matrices are scaled with the width, also when the model is widened (µP); null: "
        "not scaled",
    )
    lr_base_depth: Layers | None = Field(
        None,
        description="adamw, muon: number of blocks for which the rates were tuned: from there, "
        "those of the parameters that write the residual stream fall as 1 / blocks, also when "
        "the model is deepened (CompleteP); null: not scaled",
    )
    beta1: Fraction | None = Field(
        0.9, description="Adam's first-moment decay, also of its variants; null where there is none"
    )
    beta2: Fraction | None = Field(
        0.95, description="Adam's second-moment decay; default of torch's optimizers: 0.999"
    )
    eps: Epsilon | None = Field(1e-8, description="ε of Adam and others; null where there is none")
    weight_decay: NonNegativeFloat | None = Field(
        0.1,
        description="decoupled weight decay; sgd and torch's optimizers: default 0, added to the gradient (L2) unless "
        "their options say otherwise",
    )
    no_decay: Texts = Field(
        ("*.bias", "*norm*", "*embed*", "*wte.*", "*wpe.*"),
        description="parameter-name patterns that are not decayed, nor are vectors; default: biases, norms and "
        "embeddings, also by their names in transformers",
    )
    momentum: Fraction | None = Field(
        0.95, description="momentum of Muon, of SGD (default 0.9) and of RMSprop (default 0)"
    )
    nesterov: bool = Field(False, description="SGD: Nesterov momentum")
    ns_steps: Annotated[int, Field(gt=0, le=100)] = Field(
        5, description="Muon's orthogonalisation steps"
    )
    ns_iteration: Literal["quintic", "polar_express"] = Field(
        "quintic",
        description="Muon's orthogonalisation: quintic Newton–Schulz (5 steps), or Polar "
        "Express, which is as accurate in 3",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_by_name(cls, values: Any) -> Any:
        """Each optimizer has other defaults: weight decay as in AdamW would be far too strong in a gradient."""
        if isinstance(values, dict) and values.get("name") in get_args(OptimizerName):
            return {**defaults_of(values["name"]), **values}
        return values

    @property
    def follows_size(self) -> bool:
        """Whether rates depend on the model's width or depth."""
        return self.lr_base_width is not None or self.lr_base_depth is not None


class Watch(Section):
    """A metric of the evaluations, and when it has stopped improving."""

    metric: str = Field("loss", description="name of a metric of the task")
    direction: Direction | None = Field(
        None, description="min or max; default: the better direction of this metric"
    )
    delta: NonNegativeFloat = Field(0.0, description="minimum change that counts as an improvement")
    patience: PositiveInt = Field(
        5,
        description="evaluations in a row without improvement after which it has stopped improving: torch's "
        "ReduceLROnPlateau counts one less",
    )
    grace: NonNegativeInt = Field(
        0, description="number of first evaluations that do not count as without improvement"
    )
    start: Score | None = Field(None, description="the score to beat at first; default: none")


class PlateauConfig(Watch):
    """Reduces the learning rate when a metric has stopped improving."""

    factor: Share | None = Field(
        None, description="factor by which the rate is multiplied; default: never reduced"
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.01, description="lower bound of the peak rate, as a share of optimizer.lr"
    )


class EarlyStoppingConfig(Section):
    """Ends the run when metrics have stopped improving; rank 0 decides for all."""

    rules: Annotated[tuple[Watch, ...], Strict(False)] = Field(
        (), description="metrics to monitor; none: the run ends with its budget"
    )
    stop_when: Literal["any", "all"] = Field(
        "any", description="stop when any metric, or only when all metrics, have stopped improving"
    )


class LearningRateConfig(Section):
    """The learning rate schedule; its peak is optimizer.lr."""

    shape: Shape = Field(
        "cosine",
        description="after a linear warm-up: cosine, linear, wsd (stable, then a linear decay), step or "
        "exponential (times gamma every decay_every steps, at once or smoothly), constant, or a scheduler of torch",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of a scheduler of torch, as torch calls them, e.g. {step_size: 300} of StepLR; rates "
        "among them are those of optimizer.lr",
    )
    warmup_iters: NonNegativeInt = Field(
        100, description="steps of linear warm-up; schedulers of torch: default 0"
    )
    lr_decay_iters: PositiveInt | None = Field(
        None, description="step at which the decay ends; default: the budget of train.until"
    )
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2, description="wsd: share of lr_decay_iters spent decaying"
    )
    decay_every: PositiveInt | None = Field(
        None, description="step, exponential: steps after which the rate is multiplied by gamma"
    )
    gamma: Share = Field(
        0.5, description="step, exponential: factor applied every decay_every steps"
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1,
        description="lowest rate as a share of the peak; schedulers of torch: default 0",
    )
    plateau: PlateauConfig = subsection(
        PlateauConfig, "reduce the rate when a metric has stopped improving"
    )

    @model_validator(mode="before")
    @classmethod
    def _torchs_defaults(cls, values: Any) -> Any:
        """A scheduler of torch is by itself: without a warm-up and a lowest rate."""
        if isinstance(values, dict) and values.get("shape") in [*SCHEDULERS]:
            return {"warmup_iters": 0, "min_lr_ratio": 0.0, **values}
        return values

    @property
    def unread(self) -> list[str]:
        """Keys that are set and that the shape does not read; a scheduler of torch refuses them."""
        readers = {
            "decay_fraction": ("wsd",),
            **dict.fromkeys(("decay_every", "gamma"), ("step", "exponential")),
        }
        if self.shape in SCHEDULERS:
            return []
        fields = type(self).model_fields
        return [
            key
            for key, shapes in readers.items()
            if self.shape not in shapes and getattr(self, key) != fields[key].default
        ]

    @property
    def has_end(self) -> bool:
        """Whether the learning rate depends on the last step."""
        return self.shape in ("cosine", "linear", "wsd")


class EvalSet(Section):
    """Text that is held out beside the validation split, with metrics of its own."""

    name: Name = Field(description="name in metrics, such as code in code/loss")
    source: str = Field(description="text: a file, folder or glob, as data.source of kind tokens")
    text_field: str | None = Field(None, description="default: data.text_field")
    eval_interval: PositiveInt | None = Field(
        None,
        description="steps between evaluations, a multiple of eval.eval_interval; default: of the run",
    )


class EvalConfig(Section):
    """Held-out metrics: exact, over all ranks."""

    eval_interval: PositiveInt = Field(250, description="steps between evaluations")
    eval_epochs: PositiveInt | None = Field(
        None, description="epochs between evaluations, in place of eval_interval"
    )
    eval_iters: PositiveInt | None = Field(
        None,
        description="evaluate on a fixed subset of eval_iters × train.batch_size samples, which "
        "operations on the batch size do not change; default: the whole validation set",
    )
    batch_size: Batch | None = Field(
        None, description="batch size of an evaluation; default: 8,192 tokens"
    )
    context: Context | None = Field(
        None,
        description="text: tokens per held-out sample, so that losses stay comparable where the context "
        "changes; default: as many as training samples have",
    )
    sets: Annotated[tuple[EvalSet, ...], Strict(False)] = Field(
        (), description="text: further held-out texts, each evaluated separately"
    )
    at_start: bool | None = Field(
        None,
        description="also evaluate before the first step; default: with model.from, and where the "
        "schedule has an operation with trigger_loss",
    )


class TestConfig(Section):
    """The final test: the whole test split, once, over all ranks."""

    __test__ = False  # keeps pytest from collecting it as a test class

    at_end: bool = Field(False, description="test when the run ends")
    weights: Literal["best", "last"] = Field(
        "best", description="weights of the best checkpoint, or of the last step"
    )
    predictions: bool = Field(
        True,
        description="write every sample's prediction to a Parquet file, where a task makes any",
    )


@with_extensions("checkpoint")
class CheckpointConfig(Section):
    """When a run is saved, what is saved, and which checkpoints are kept."""

    every_steps: PositiveInt | None = Field(None, description="steps between saves")
    every_tokens: PositiveInt | None = Field(None, description="tokens between saves")
    every_epochs: PositiveInt | None = Field(
        None, description="epochs between saves, each after the last step of one"
    )
    every_minutes: Seconds | None = Field(10.0, description="minutes between saves")
    on_best: bool = Field(True, description="save whenever a metric of best_of is the best so far")
    best_of: Texts = Field(
        ("loss",),
        description="metrics of which the best checkpoint is kept, the first being `best`, others `best-<metric>`",
    )
    on_growth: bool = Field(True, description="save after every operation that changes the model")
    asynchronous: bool = Field(
        True,
        description="write in the background while training continues; saves at a stop, a signal "
        "or the end are always waited for",
    )
    keep_last: PositiveInt = Field(3, description="number of latest checkpoints to keep")
    keep_best: NonNegativeInt = Field(
        1, description="number of best checkpoints to keep, by the first metric of best_of"
    )
    keep_every: PositiveInt | None = Field(
        None, description="checkpoints whose step is a multiple of this are never deleted"
    )
    save_optimizer_state: bool = Field(True, description="save the optimizer's moments")
    save_scheduler_state: bool = Field(
        True, description="save the position in the learning rate schedule and the operations done"
    )
    save_dataset_state: bool = Field(True, description="save the cursor: the position in the data")
    save_rng_state: bool = Field(True, description="save each rank's random generators")

    @property
    def intervals(self) -> Mapping[SaveUnit, int]:
        """The counts between saves, by what is counted."""
        counts: dict[SaveUnit, int | None] = {
            "steps": self.every_steps,
            "tokens": self.every_tokens,
            "epochs": self.every_epochs,
        }
        return {unit: count for unit, count in counts.items() if count is not None}


class DDPConfig(Section):
    """Options of DistributedDataParallel."""

    bucket_cap_mb: PositiveFloat = Field(25.0, description="size of a gradient bucket, MiB")
    find_unused_parameters: bool = Field(False, description="for models that skip parameters")
    static_graph: bool = Field(False, description="the graph never changes between steps")
    gradient_as_bucket_view: bool = Field(True, description="gradients live inside the buckets")
    broadcast_buffers: bool = Field(False, description="send rank 0's buffers at every forward")
    exchange: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="type in which gradients are sent and added; bfloat16, for slow networks: "
        "half as many bytes",
    )


class ElasticConfig(Section):
    """What `reproducible: elastic` holds fixed while the number of ranks changes."""

    virtual_ranks: Annotated[int, Field(gt=0, le=4096)] = Field(
        4,
        description="slices of every step, a power of two, which as many ranks or 2, 4, 8 … "
        "times fewer share",
    )
    threads: Annotated[int, Field(gt=0, le=MOST_PROCESSES)] = Field(
        1,
        description="CPU threads of each rank; with another number, results are rounded "
        "differently",
    )


class FSDPConfig(Section):
    """Options of sharded training."""

    shards: Annotated[int, Field(ge=2, le=2**16)] | None = Field(
        None,
        description="hsdp: number of ranks that share one copy of the model, e.g. those of a machine",
    )
    reshard_after_forward: bool = Field(
        True,
        description="free a block's gathered parameters after its forward pass, and gather them "
        "again in the backward pass: less memory, half as much communication again",
    )
    gather: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="type in which the weights of the blocks' linear layers are sent; bfloat16, "
        "with precision bf16, sends half as much and changes no bit where autocast rounds them "
        "to it anyway",
    )
    offload: bool = Field(
        False,
        description="GPUs: keep weights, gradients and optimizer state in host memory, and update them there; "
        "slower, for models whose share does not fit",
    )
    reduce_each_micro_batch: bool = Field(
        False,
        description="send the gradients of every micro-batch, not of a whole step: no rank keeps "
        "the gradients of all blocks, at the cost of more messages; not with reproducible: elastic",
    )


class DiLoCoConfig(Section):
    """Options of training with local steps and an outer optimizer, DiLoCo."""

    sync_every: Annotated[int, Field(gt=0, le=10**6)] = Field(
        50, description="steps of a round, in which ranks do not communicate; the paper uses 500"
    )
    outer_lr: Annotated[float, Field(gt=0, le=10)] = Field(
        0.7, description="learning rate of the outer optimizer, SGD"
    )
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="its Nesterov momentum; 0 with outer_lr 1: weights are averaged"
    )
    exchange: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="type in which changes of weights, and the optimizer's state, are sent; "
        "bfloat16: half as many bytes",
    )


class ParallelConfig(Section):
    """The ranks of a run and their communication."""

    world_size: Ranks | None = Field(
        None,
        description="ranks that `instar train` starts on this machine; default: one per device, or one",
    )
    devices: Annotated[tuple[Device, ...], Strict(False)] = Field(
        (), description="GPUs of the ranks by index, e.g. [3, 4, 5]; default: 0, 1, 2 …"
    )
    master_address: str = Field(
        "127.0.0.1", description="rendezvous address, unless the environment sets MASTER_ADDR"
    )
    master_port: Annotated[int, Field(ge=0, lt=65536)] = Field(
        0, description="rendezvous port; 0: a free one"
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="auto: nccl on GPUs, gloo on CPUs"
    )
    timeout_s: Seconds = Field(
        600.0,
        description="maximum wait for a rank that is alive, seconds: preparing data, compiling and "
        "saving must each take less; then all ranks end with an error that names the missing one",
    )
    silence_s: Seconds = Field(
        60.0,
        description="a rank without a heartbeat for this long is considered dead, seconds; at most timeout_s",
    )
    strategy: Literal["auto", "ddp", "fsdp", "hsdp", "diloco"] = Field(
        "ddp",
        description="ddp: every rank has the whole model; fsdp: each has a part of every parameter, "
        "gradient and optimizer state; hsdp: groups of parallel.fsdp.shards ranks share a model; auto: "
        "ddp where the model fits on each device, else fsdp; diloco, for slow networks: each rank trains "
        "a model of its own, and after parallel.diloco.sync_every steps all take a common step",
    )
    ddp: DDPConfig = subsection(DDPConfig, "DistributedDataParallel")
    fsdp: FSDPConfig = subsection(FSDPConfig, "fully_shard")
    diloco: DiLoCoConfig = subsection(DiLoCoConfig, "local steps and an outer optimizer")
    elastic: ElasticConfig = subsection(ElasticConfig, "for reproducible: elastic")

    def shards_of(self, world_size: int) -> int:
        """Return the number of ranks that share one copy of the model."""
        if self.strategy == "fsdp":
            return world_size
        if self.strategy == "hsdp":
            return min(world_size, self.fsdp.shards or world_size)
        return 1


class RunConfig(Section):
    """A whole run."""

    name: Name = Field("run", description=NAME)
    preset: Texts | str = Field(
        (),
        description="ready-made settings, which this file overrides: gpt2, llama, plain, fast; "
        "moult and family derive a schedule of growth to the shape in this file",
    )
    sizes: Annotated[tuple[PositiveInt, ...], Strict(False)] = Field(
        (),
        description="presets moult and family: layers of each size, e.g. [2, 4, 8], the last as "
        "model.n_layer; default: a quarter and half of the final layers, or else half or a third",
    )
    seed: Seed = Field(1337, description="seed of all random numbers")
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = Field(
        "auto", description="auto, cpu, cuda or cuda:<index>"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="of the forward pass; weights stay fp32; auto: bf16 for a language model where "
        "it is faster on every rank's device, else fp32",
    )
    tf32: bool = Field(
        True,
        description="on GPUs, multiply float32 matrices with 10 bits of mantissa, several times as fast; "
        "never with reproducible: elastic",
    )
    compile: bool = Field(False, description="torch.compile the model")
    compile_stages: bool = Field(
        False,
        description="with compile: compile the graphs of every stage of the schedule before the first "
        "step, so that growth finds them in torch's cache",
    )
    reproducible: Literal["fixed", "elastic"] = Field(
        "fixed",
        description="bit for bit: fixed, with the same number of ranks and threads; elastic, with "
        "any number of ranks that shares parallel.elastic.virtual_ranks",
    )
    task: str = Field(
        "language",
        description="what is trained: language, causal_lm (a model of transformers), graph, or your own as "
        "module:class",
    )
    schedule: Annotated[tuple[ScheduledOperation, ...], Strict(False)] = Field(
        (),
        description="operations that change the run while it runs, in their order: a list, or the "
        "path of a YAML or JSON file with it",
    )
    model: Section = subsection(Section, "the model's shape")
    data: FeedConfig = subsection(FeedConfig, "samples and their order")
    train: TrainConfig = subsection(TrainConfig, "steps and budget")
    optimizer: OptimizerConfig = subsection(OptimizerConfig, "the update")
    learning_rate: LearningRateConfig = subsection(LearningRateConfig, "the learning rate schedule")
    eval: EvalConfig = subsection(EvalConfig, "held-out metrics")
    early_stopping: EarlyStoppingConfig = subsection(EarlyStoppingConfig, "when to stop early")
    test: TestConfig = subsection(TestConfig, "the final test")
    record: RecordConfig = subsection(RecordConfig, "what is written down")
    checkpoint: CheckpointConfig = subsection(CheckpointConfig, "when to save, and what to keep")
    resume: Literal["never", "auto"] = Field(
        "never", description="auto: resume the run in record.run_dir if it exists, else start it"
    )
    parallel: ParallelConfig = subsection(ParallelConfig, "ranks and their communication")

    extension_names: ClassVar[tuple[str, ...]] = ()
    """extensions of other packages whose sections the config has"""

    @property
    def starts_from(self) -> str | None:
        """The weights to start from, `model.from`; None: random ones."""
        start: str | None = getattr(self.model, FROM, None)
        return start

    @property
    def metrics(self) -> Mapping[str, Direction]:
        """The metrics of an evaluation, `loss` first, each with its better direction."""
        return {"loss": "min"}

    @property
    def requested_metrics(self) -> dict[str, str]:
        """The metrics that the run is steered by, by the keys that name them."""
        rules, best_of = enumerate(self.early_stopping.rules), enumerate(self.checkpoint.best_of)
        return {
            "learning_rate.plateau.metric": self.learning_rate.plateau.metric,
            **{f"early_stopping.rules[{number}].metric": rule.metric for number, rule in rules},
            **{f"checkpoint.best_of[{number}]": metric for number, metric in best_of},
        }

    def conflicts(self) -> list[ConfigProblem]:
        """Return conflicts among this task's own keys."""
        return []

    def rank_conflicts(self, world_size: int) -> list[ConfigProblem]:  # noqa: ARG002
        """Return conflicts of this task's own keys with a number of ranks."""
        return []

    @property
    def measures_noise(self) -> bool:
        """Whether the gradient noise scale is measured: by default, unless that would call a user's
        code more often than it expects, or no rank has the gradient of a global batch."""
        every = self.record.noise_every
        if every is None:
            return ":" not in self.task and self.parallel.strategy != "diloco"
        return every > 0

    @property
    def data_seed(self) -> int:
        """The seed of splits and generated samples; `seed` orders them and initialises weights."""
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def context(self) -> int:
        """Initial sample length in tokens; 1 for samples without a length."""
        return 1

    @property
    def longest_context(self) -> int | None:
        """The most tokens that the model can read at step 0; None: not known from the config."""
        return self.context


def _no_number(size: int | float | str) -> int | float | str:
    """Reject text that was meant as a number and would be read as a file name."""
    if isinstance(size, str) and (number := meant_number(size, "")) is not None:
        raise ValueError(f"would be read as a file name, write {number}")
    return size


Whole = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Size = Annotated[Whole | Score | str, AfterValidator(_no_number)]
"""The size of a split: a count of samples, a share below 1, or a file with sample numbers."""


class SamplesConfig(FeedConfig):
    """Where the samples are, how they are split, and how they reach the ranks."""

    val: Size = Field(
        0.1,
        description="validation split: a share below 1, a count, or a text file of sample numbers",
    )
    test: Size = Field(0.1, description="test split, as val")
    stratify: str | None = Field(
        None, description="column of classes, of which every split gets the same shares"
    )
    sample_weights: str | None = Field(
        None,
        description="column with the weight of each sample: training samples are drawn with replacement, in proportion "
        "to it, as many an epoch as there are",
    )
    balance: str | None = Field(
        None,
        description="column of classes, each of which is drawn equally often in training, its samples in a shuffled "
        "order of their own",
    )
    folds: Annotated[int, Field(ge=2, le=10**6)] | None = Field(
        None,
        description="cross-validation: number of parts, alike in size, into which all samples but those of test are "
        "drawn; one of them is the validation split, in place of val",
    )
    fold: NonNegativeInt = Field(
        0, description="which of data.folds is the validation split, from 0; the others are trained"
    )
