"""What a config of a graph network says of its model, its heads and its graphs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from instar.config.causal_sets import CausalSetsConfig
from instar.config.clash import Clash
from instar.config.samples import SamplesConfig
from instar.config.schema import (
    NAME,
    CheckpointConfig,
    Direction,
    EvalConfig,
    LearningRateConfig,
    Name,
    NonNegativeInt,
    OptimizerConfig,
    RunConfig,
    TestConfig,
    TrainConfig,
)
from instar.config.section import Fraction, PositiveFloat, PositiveInt, Section, Texts

Level = Literal["graph", "node"]
Layer = Literal["gin", "sage", "gcn", "gat"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["relu", "gelu", "silu"]
Flow = Literal["both", "forward", "symmetric"]
Pooling = Literal["mean", "sum", "max", "attention"]


class HeadConfig(Section):
    """One thing that is predicted of every graph, or of every node."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")] = Field(
        description="what its metrics and predictions are called"
    )
    target: str | None = Field(None, description="column of its targets; default: its name")
    kind: Literal["classification", "regression"] = Field(
        description="classification: a class 0, 1, 2 …, or -1 where there is none (cross entropy, "
        "nats); regression: a number (squared error)"
    )
    classes: Annotated[int, Field(ge=2)] | None = Field(
        None, description="how many classes; only of a classification, which needs it"
    )
    weight: PositiveFloat = Field(1.0, description="of its loss in the sum over heads")
    level: Level = Field(
        "graph",
        description="graph: one target for each graph; node: one for each node; alike in all heads",
    )

    @property
    def column(self) -> str:
        """The column of its targets."""
        return self.target or self.name

    @property
    def metrics(self) -> dict[str, Direction]:
        """What is measured of it: cross entropy and accuracy, or mean absolute and squared errors."""
        if self.kind == "classification":
            return {f"{self.name}/loss": "min", f"{self.name}/accuracy": "max"}
        return {f"{self.name}/mae": "min", f"{self.name}/mse": "min"}

    @property
    def outputs(self) -> int:
        """Numbers that the model says of it: logits of classes, or a value."""
        return self.classes or 1


OF_CAUSAL_SETS = (
    HeadConfig(name="manifold", kind="classification", classes=2),
    HeadConfig(name="dimension", kind="classification", classes=3),
    HeadConfig(name="ordering_fraction", kind="regression", weight=10.0),
)
"""What can be asked of a causal set: whether it was sprinkled, into 2, 3 or 4 dimensions, and how
many of its pairs are related."""


class GraphModelConfig(Section):
    """The shape of the graph network, from encoder to heads."""

    layer: Layer = Field(
        "sage",
        description="what a node hears of its neighbours: gin, their sum; sage, their mean; gcn, "
        "their sum divided by the roots of both degrees; gat, a mean by attention (GATv2)",
    )
    n_layer: PositiveInt = Field(3, description="number of blocks")
    width: PositiveInt = Field(32, description="width of the residual stream of each node")
    n_mlp: PositiveInt | None = Field(None, description="MLP width; default 2 × width")
    n_readout: PositiveInt | None = Field(
        None, description="width between pooling and heads; default: width"
    )
    n_head: PositiveInt = Field(4, description="gat: attention heads; they share the width")
    flow: Flow = Field(
        "both",
        description="which neighbours are heard: both, those that an edge comes from and those that "
        "one leads to, each with weights of their own; forward, only those that an edge comes from; "
        "symmetric, both with the same weights",
    )
    norm: Norm = Field("layernorm", description="normalisation of each node")
    norm_eps: PositiveFloat = Field(1e-5, description="ε of the normalisations")
    activation: Activation = Field("gelu", description="MLP nonlinearity")
    dropout: Fraction = Field(0.0, description="dropout probability of what a block adds")
    pooling: Annotated[tuple[Pooling, ...], Strict(False)] = Field(
        ("mean", "max"),
        description="how nodes become a graph, one or several side by side: mean, sum, max, or "
        "attention (a mean whose weights are learned); of heads for graphs",
    )
    graph_features: bool = Field(
        False, description="also read the column `graph`: features of a whole graph"
    )
    max_nodes: PositiveInt | None = Field(
        None, description="largest graph that is accepted; default: any"
    )
    heads: Annotated[tuple[HeadConfig, ...], Strict(False)] = Field(
        OF_CAUSAL_SETS, description="what is predicted; default: what causal sets are asked"
    )

    @property
    def level(self) -> Level:
        """What the heads speak of, and what the loss is a mean over."""
        return self.heads[0].level if self.heads else "graph"


class GraphDataConfig(SamplesConfig):
    """Where the graphs are, how they are split, and how they reach the ranks."""

    source: str = Field(
        "causal_sets",
        description="causal_sets (generated once, as data.causal_sets says), the folder of an array "
        "store, or module:function, which gives samples",
    )
    causal_sets: CausalSetsConfig = Field(
        default_factory=CausalSetsConfig, description="which causal sets are generated"
    )


def _same(section: type[Section], key: str) -> str:
    """The description of a key that has another default here."""
    return section.model_fields[key].description or ""


class GraphTrainConfig(TrainConfig):
    """How much of what one step does, and when to stop."""

    until: Texts = Field(("10ep",), description=_same(TrainConfig, "until"))
    batch_size: PositiveInt = Field(32, description=_same(TrainConfig, "batch_size"))


class GraphOptimizerConfig(OptimizerConfig):
    """How a gradient becomes an update."""

    lr: PositiveFloat = Field(3e-3, description=_same(OptimizerConfig, "lr"))
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.01, description=_same(OptimizerConfig, "weight_decay")
    )


class GraphLearningRateConfig(LearningRateConfig):
    """The learning rate's course over the steps; its height is optimizer.lr."""

    warmup_iters: NonNegativeInt = Field(50, description=_same(LearningRateConfig, "warmup_iters"))


class GraphEvalConfig(EvalConfig):
    """Held-out metrics: exact, over all ranks."""

    eval_epochs: PositiveInt | None = Field(1, description=_same(EvalConfig, "eval_epochs"))
    batch_size: PositiveInt | None = Field(64, description="graphs at once in an evaluation")


class GraphTestConfig(TestConfig):
    """The final test: the whole test split, once, over all ranks."""

    at_end: bool = Field(True, description=_same(TestConfig, "at_end"))


class GraphCheckpointConfig(CheckpointConfig):
    """When a run is saved, what of it, and which checkpoints stay."""

    on_best: bool = Field(True, description=_same(CheckpointConfig, "on_best"))


class GraphConfig(RunConfig):
    """A whole run of a graph network."""

    name: Name = Field("graph", description=NAME)
    task: str = Field("graph", description=_same(RunConfig, "task"))
    model: GraphModelConfig = Field(
        default_factory=GraphModelConfig, description="the graph network's shape"
    )
    data: GraphDataConfig = Field(
        default_factory=GraphDataConfig, description="graphs and their order"
    )
    train: GraphTrainConfig = Field(
        default_factory=GraphTrainConfig, description=_same(RunConfig, "train")
    )
    optimizer: GraphOptimizerConfig = Field(
        default_factory=GraphOptimizerConfig, description=_same(RunConfig, "optimizer")
    )
    learning_rate: GraphLearningRateConfig = Field(
        default_factory=GraphLearningRateConfig, description=_same(RunConfig, "learning_rate")
    )
    eval: GraphEvalConfig = Field(
        default_factory=GraphEvalConfig, description=_same(RunConfig, "eval")
    )
    test: GraphTestConfig = Field(
        default_factory=GraphTestConfig, description=_same(RunConfig, "test")
    )
    checkpoint: GraphCheckpointConfig = Field(
        default_factory=GraphCheckpointConfig, description=_same(RunConfig, "checkpoint")
    )

    @property
    def metrics(self) -> dict[str, Direction]:
        found: dict[str, Direction] = {"loss": "min"}
        for head in self.model.heads:
            found |= head.metrics
        return found

    def clashes(self) -> list[Clash]:
        from instar.config.graph_checks import graph_clashes

        return graph_clashes(self)
