"""What a config file may say whatever is trained: frozen models, one per section, torch-free.

A task adds what it wants to know of its model and its data (`config/language.py`, `graph.py`; a
user's own). Every field carries its description; `instar init`, `instar config schema` and the
error messages are made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, Strict

from instar.config.clash import Clash
from instar.config.record import RecordConfig
from instar.config.schedule import ScheduledOperation
from instar.config.section import Fraction, PositiveFloat, PositiveInt, Section, Texts

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
NAME = "the run's name, the first part of its folder's"
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Direction = Literal["min", "max"]


class FeedConfig(Section):
    """Where the samples are, in which order they come, and how they reach the ranks."""

    path: str | None = Field(None, description="folder of the data")
    strategy: Literal["sharded", "dispatched"] = Field(
        "sharded",
        description="sharded: each rank reads its own samples; dispatched: rank 0 reads and sends",
    )
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
    workers: Annotated[int, Field(ge=0)] = Field(
        0, description="processes of each reading rank that read and tokenise; 0: the rank itself"
    )
    transform: str | None = Field(
        None,
        description="module:function(sample, generator) → sample, applied to every training sample; "
        "the generator comes from (seed, epoch, sample)",
    )
    prefetch: bool = Field(True, description="prepare the next steps' batches in the background")

    @property
    def read_from_start(self) -> bool:
        """Whether a place in the data is reached only through all that lies before it."""
        return False


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


class Watch(Section):
    """A metric of the evaluations, and when it counts as standing still."""

    metric: str = Field("loss", description="name of a metric of the task")
    direction: Direction | None = Field(
        None, description="min or max; default: what is better of this metric"
    )
    delta: NonNegativeFloat = Field(0.0, description="a change must be larger to count as better")
    patience: PositiveInt = Field(
        5, description="evaluations in a row that are no better, after which it stands still"
    )
    grace: NonNegativeInt = Field(
        0, description="so many first evaluations are not counted against it"
    )
    start: float | None = Field(None, description="the score to beat at first; default: none")


class PlateauConfig(Watch):
    """The rate falls where a metric stands still; on top of its course."""

    factor: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="what the rate is multiplied by; default: never"
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.01, description="of optimizer.lr, below which the peak is not lowered"
    )


class EarlyStoppingConfig(Section):
    """The run ends where metrics of its evaluations stand still; rank 0 decides for all."""

    rules: Annotated[tuple[Watch, ...], Strict(False)] = Field(
        (), description="metrics to watch; none: the run goes on until its budget is used up"
    )
    mode: Literal["any", "all"] = Field(
        "any", description="whether one metric that stands still is enough, or all must at once"
    )


class LearningRateConfig(Section):
    """The learning rate's course over the steps; its height is optimizer.lr."""

    shape: Literal["cosine", "linear", "wsd", "step", "exponential", "constant"] = Field(
        "cosine",
        description="after a linear warm-up: cosine, linear, wsd (stable, then a linear decay), step or "
        "exponential (times gamma every decay_every steps, at once or smoothly), or constant",
    )
    warmup_iters: Annotated[int, Field(ge=0)] = Field(100, description="steps of linear warm-up")
    lr_decay_iters: PositiveInt | None = Field(
        None, description="step at which the decay ends; default: the budget of train.until"
    )
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2, description="wsd: share of lr_decay_iters spent decaying"
    )
    decay_every: PositiveInt | None = Field(
        None, description="step, exponential: steps in which the rate falls by gamma"
    )
    gamma: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="step, exponential: what is left of the rate after decay_every steps"
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="lowest rate as a share of the peak"
    )
    plateau: PlateauConfig = Field(
        default_factory=lambda: PlateauConfig(), description="lower it where a metric stands still"
    )

    @property
    def has_end(self) -> bool:
        """Whether the course must know its last step."""
        return self.shape in ("cosine", "linear", "wsd")


class EvalConfig(Section):
    """Held-out metrics: exact, over all ranks."""

    eval_interval: PositiveInt = Field(250, description="steps between evaluations")
    eval_epochs: PositiveInt | None = Field(
        None, description="evaluate after every so many epochs, in place of eval_interval"
    )
    eval_iters: PositiveInt | None = Field(
        None, description="so many fixed batches of batch_size; default: the whole validation set"
    )
    batch_size: PositiveInt | None = Field(
        None, description="samples at once in an evaluation; default: as many as make 8,192 tokens"
    )
    at_start: bool = Field(False, description="also evaluate before the first step")


class TestConfig(Section):
    """The final test: the whole test split, once, over all ranks."""

    __test__ = False  # for pytest, which takes it for one of its own

    at_end: bool = Field(False, description="test when the run has come to its end")
    weights: Literal["best", "last"] = Field(
        "best", description="whose: those of the best checkpoint, or of the last step"
    )
    predictions: bool = Field(
        True,
        description="write every sample's prediction to a Parquet file, where a task makes any",
    )


class CheckpointConfig(Section):
    """When a run is saved, what of it, and which checkpoints stay."""

    every_steps: PositiveInt | None = Field(None, description="save every so many steps")
    every_tokens: PositiveInt | None = Field(None, description="save every so many tokens")
    every_minutes: PositiveFloat | None = Field(
        10.0, description="save when so many minutes have passed since the last save"
    )
    on_best: bool = Field(False, description="save whenever a metric of best_of is the best so far")
    best_of: Texts = Field(
        ("loss",),
        description="metrics of which the best checkpoint is kept, the first being `best`, others "
        "`best-<metric>`",
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


class ParallelConfig(Section):
    """Ranks and how they talk."""

    world_size: PositiveInt | None = Field(
        None,
        description="ranks that `instar train` starts on this machine; default: as many as devices, "
        "or one",
    )
    devices: Annotated[tuple[NonNegativeInt, ...], Strict(False)] = Field(
        (), description="GPUs of the ranks by index, e.g. [3, 4, 5]; default: 0, 1, 2 …"
    )
    master_address: str = Field(
        "127.0.0.1", description="where the ranks meet, if nothing in the environment says so"
    )
    master_port: Annotated[int, Field(ge=0, lt=65536)] = Field(
        0, description="port at which they meet; 0: a free one"
    )
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

    name: Name = Field("run", description=NAME)
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
    compile_ahead: Literal["auto"] | bool = Field(
        "auto",
        description="with compile: a process beside the run compiles the model that the schedule's "
        "next growth leads to; auto: where a processor is idle",
    )
    reproducible: Literal["fixed", "elastic"] = Field(
        "fixed",
        description="bit for bit: fixed, with the same number of ranks and threads; elastic, with "
        "any number of ranks that shares parallel.elastic.virtual_ranks",
    )
    task: str = Field(
        "language",
        description="what is trained: language, graph, or your own as module:class",
    )
    schedule: Annotated[tuple[ScheduledOperation, ...], Strict(False)] = Field(
        (),
        description="operations that change the run while it runs, in their order: a list, or the "
        "path of a YAML or JSON file with it",
    )
    model: Section = Field(default_factory=Section, description="the model's shape")
    data: FeedConfig = Field(default_factory=FeedConfig, description="samples and their order")
    train: TrainConfig = Field(default_factory=TrainConfig, description="steps and budget")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="the update")
    learning_rate: LearningRateConfig = Field(
        default_factory=LearningRateConfig, description="the rate's course"
    )
    eval: EvalConfig = Field(default_factory=EvalConfig, description="held-out metrics")
    early_stopping: EarlyStoppingConfig = Field(
        default_factory=EarlyStoppingConfig, description="when to give up"
    )
    test: TestConfig = Field(default_factory=TestConfig, description="the final test")
    record: RecordConfig = Field(default_factory=RecordConfig, description="what is written down")
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="when to save, and what stays"
    )
    resume: Literal["never", "auto"] = Field(
        "never",
        description="auto: go on with the run in record.run_dir if there is one, else begin it",
    )
    parallel: ParallelConfig = Field(
        default_factory=ParallelConfig, description="ranks and how they talk"
    )

    @property
    def metrics(self) -> Mapping[str, Direction]:
        """Every metric that an evaluation gives, `loss` first, and which of its values are better."""
        return {"loss": "min"}

    def clashes(self) -> list[Clash]:
        """What of this task's own keys contradicts itself."""
        return []

    def rank_clashes(self, world_size: int) -> list[Clash]:  # noqa: ARG002
        """What of this task's own keys so many ranks contradict."""
        return []

    @property
    def context(self) -> int:
        """How long samples are at first: tokens of a text; 1 where there is no length to choose."""
        return 1
