"""Config sections of a graph network: model, heads, graphs; and their checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, Field, Strict

from instar.config.errors import ConfigProblem
from instar.config.schema import Direction, RunConfig, SamplesConfig
from instar.config.sections import (
    MOST_VOCABULARY,
    Epsilon,
    Fraction,
    Heads,
    Layers,
    MLPWidth,
    ModelSection,
    PositiveFloat,
    PositiveInt,
    Section,
    Width,
    subsection,
    with_fields,
)

C = TypeVar("C", bound=RunConfig)

CAUSAL_SETS = "causal_sets"
"""the `data.source` of generated causal sets"""
CAUSAL_SETS_SECTION = f"data.{CAUSAL_SETS}"

Level = Literal["graph", "node"]
Layer = Literal["gin", "sage", "gcn", "gat"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["relu", "gelu", "silu"]
Flow = Literal["both", "forward", "symmetric"]
Pooling = Literal["mean", "sum", "max", "attention"]
ClassMetric = Literal["f1", "auroc", "average_precision", "mcc"]
ValueMetric = Literal["r2", "pearson", "spearman"]
HeadMetric = Literal[ClassMetric, ValueMetric]


class HeadConfig(Section):
    """A prediction for every graph, or for every node."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")] = Field(
        description="name of its metrics and predictions"
    )
    target: str | None = Field(None, description="column of its targets; default: its name")
    kind: Literal["classification", "regression"] = Field(
        description="classification: a class 0, 1, 2 …, or -1 where there is none (cross entropy, "
        "nats); regression: a number (squared error)"
    )
    classes: Annotated[int, Field(ge=2, le=MOST_VOCABULARY)] | None = Field(
        None, description="how many classes; only of a classification, which needs it"
    )
    weight: PositiveFloat = Field(1.0, description="of its loss in the sum over heads")
    metrics: Annotated[tuple[HeadMetric, ...], Strict(False)] = Field(
        (),
        description="further metrics, of the whole evaluation set (need torchmetrics): f1, auroc, "
        "average_precision (means over classes) or mcc of a classification; r2, pearson or spearman "
        "of a regression",
    )
    level: Level = Field(
        "graph",
        description="graph: one target for each graph; node: one for each node; alike in all heads",
    )

    @property
    def column(self) -> str:
        """The column that holds its targets."""
        return self.target or self.name

    @property
    def directions(self) -> dict[str, Direction]:
        """Its metrics: cross entropy and accuracy, or mean absolute and squared errors; and
        `metrics`."""
        directions: dict[str, Direction] = (
            {"loss": "min", "accuracy": "max"}
            if self.kind == "classification"
            else {"mae": "min", "mse": "min"}
        )
        directions |= dict.fromkeys(self.metrics, "max")
        return {f"{self.name}/{metric}": direction for metric, direction in directions.items()}

    @property
    def outputs(self) -> int:
        """The number of outputs: one logit per class, or one value."""
        return self.classes or 1


_CAUSAL_SET_HEADS = (
    HeadConfig(name="manifold", kind="classification", classes=2),
    HeadConfig(name="dimension", kind="classification", classes=3),
    HeadConfig(name="ordering_fraction", kind="regression", weight=10.0),
)
"""The targets of a causal set: whether it is a sprinkling, its dimension (2, 3 or 4), and its
ordering fraction."""


class GraphModelConfig(ModelSection):
    """The shape of the graph network, from encoder to heads."""

    layer: Layer = Field(
        "sage",
        description="aggregation of a node's neighbours: gin, their sum; sage, their mean; gcn, "
        "their sum divided by the roots of both degrees; gat, a mean by attention (GATv2)",
    )
    n_layer: Layers = Field(3, description="number of blocks")
    width: Width = Field(32, description="width of the residual stream of each node")
    n_mlp: MLPWidth | None = Field(None, description="MLP width; default 2 × width")
    n_readout: MLPWidth | None = Field(
        None, description="width between pooling and heads; default: width"
    )
    n_head: Heads = Field(4, description="gat: attention heads; they share the width")
    flow: Flow = Field(
        "both",
        description="direction of messages: both, along and against edges, with separate weights; "
        "forward, along edges only; symmetric, both with the same weights",
    )
    norm: Norm = Field("layernorm", description="normalisation of each node")
    norm_eps: Epsilon = Field(1e-5, description="ε of the normalisations")
    activation: Activation = Field("gelu", description="MLP nonlinearity")
    dropout: Fraction = Field(0.0, description="dropout probability of a block's output")
    pooling: Annotated[tuple[Pooling, ...], Strict(False)] = Field(
        ("mean", "max"),
        description="how nodes become a graph, one or several side by side: mean, sum, max, or "
        "attention (a mean whose weights are learned); of heads for graphs",
    )
    graph_features: bool = Field(
        False, description="also read the column `graph`: features of a whole graph"
    )
    edge_features: bool = Field(
        False,
        description="also read the column `edge_attr`: features of each edge, which are added to what "
        "its sender sends (as in GINE), or to the scores of attention",
    )
    mask: str | None = Field(
        None,
        description="column of booleans, one for each node: losses and metrics count only where it is "
        "true; of heads for nodes",
    )
    max_nodes: PositiveInt | None = Field(
        None, description="largest graph that is accepted; default: any"
    )
    heads: Annotated[tuple[HeadConfig, ...], Strict(False)] = Field(
        _CAUSAL_SET_HEADS, description="what is predicted; default: the targets of causal_sets"
    )

    @property
    def level(self) -> Level:
        """What the heads predict for, and what the loss is averaged over."""
        return self.heads[0].level if self.heads else "graph"


Points = Annotated[int, Field(ge=2, le=2**14)]


class CausalSetsConfig(Section):
    """Sprinklings of Minkowski space, and percolation orders with as many relations."""

    sets: Annotated[int, Field(gt=0, le=10**8)] = Field(
        20_000, description="causal sets, about half of them sprinkled"
    )
    min_points: Points = Field(64, description="points of the smallest sets")
    max_points: Points = Field(256, description="points of the largest sets")
    dimensions: Annotated[tuple[Literal[2, 3, 4], ...], Strict(False), Field(min_length=1)] = Field(
        (2, 3, 4), description="dimensions of the spacetimes, equally likely"
    )
    relations: Literal["links", "causal"] = Field(
        "links",
        description="edges of the graph: links (the transitive reduction) or causal (all relations)",
    )
    features: Annotated[
        tuple[Literal["links", "volumes"], ...], Strict(False), Field(min_length=1)
    ] = Field(
        ("links",),
        description="node features: links, log(1 + n) of a point's links to the past and to the "
        "future; volumes, the fractions of the set in its past and in its future, whose mean reveals "
        "the ordering fraction",
    )


class GraphDataConfig(SamplesConfig):
    """Where the graphs are, how they are split, and how they reach the ranks."""

    source: str = Field(
        CAUSAL_SETS,
        description="causal_sets (generated once, as data.<source> says), the folder of "
        "an array store, or module:function, which gives samples",
    )
    causal_sets: CausalSetsConfig = subsection(CausalSetsConfig, "options of source: causal_sets")

    @property
    def is_generated(self) -> bool:
        """Whether the graphs are causal sets, made on the spot."""
        return self.source == CAUSAL_SETS


def _with_defaults(values: Mapping[str, Any]) -> Callable[[type[C]], type[C]]:
    """Decorate a config class with other defaults for keys of the common sections."""

    def changed(section: type[BaseModel], inside: str, **more: Any) -> Any:
        fields = dict(more)
        hints = get_type_hints(section, include_extras=True)
        for key, value in values.items():
            home, _, name = key.rpartition(".")
            if home == inside:
                description = section.model_fields[name].description
                fields[name] = (hints[name], Field(value, description=description))
        return with_fields(section, fields)

    def decorated(root: type[C]) -> type[C]:
        sections: dict[str, Any] = {}
        for name in dict.fromkeys(key.partition(".")[0] for key in values if "." in key):
            field = root.model_fields[name]
            assert isinstance(field.annotation, type)
            section = changed(field.annotation, name)
            factory = subsection(section, field.description)
            sections[name] = section, factory
        config_class: type[C] = changed(root, "", **sections)
        return config_class

    return decorated


@_with_defaults(
    {
        "name": "graph",
        "task": "graph",
        "train.until": ("10ep",),
        "train.batch_size": 32,
        "optimizer.lr": 3e-3,
        "optimizer.weight_decay": 0.01,
        "learning_rate.warmup_iters": 50,
        "eval.eval_epochs": 1,
        "eval.batch_size": 64,
        "test.at_end": True,
    }
)
class GraphConfig(RunConfig):
    """A whole run of a graph network."""

    model: GraphModelConfig = subsection(GraphModelConfig, "the graph network's shape")
    data: GraphDataConfig = subsection(GraphDataConfig, "graphs and their order")

    @property
    def metrics(self) -> dict[str, Direction]:
        directions: dict[str, Direction] = {"loss": "min"}
        for head in self.model.heads:
            directions |= head.directions
        return directions

    def conflicts(self) -> list[ConfigProblem]:
        return graph_checks(self)


def graph_checks(config: GraphConfig) -> list[ConfigProblem]:
    """Return the conflicts within the model, its heads and its data."""
    problems = [*_heads(config.model), *_shape(config.model)]
    if config.data.is_generated:
        conflicts = causal_set_conflicts(config.data.causal_sets)
        problems += [ConfigProblem(keys, message) for keys, message in conflicts]
    return problems


def _heads(model: GraphModelConfig) -> Iterator[ConfigProblem]:
    heads = model.heads
    if not heads:
        message = "model.heads is empty: there is nothing to learn"
        hint = "e.g. - {name: manifold, kind: classification, classes: 2}"
        yield ConfigProblem(("model.heads",), message, hint)
    for name, count in Counter(head.name for head in heads).items():
        if count > 1:
            message = f"model.heads: {count} heads are called {name!r}"
            hint = "give each its own name; target names the column it reads"
            yield ConfigProblem(("model.heads",), message, hint)
    for index, head in enumerate(heads):
        key = f"model.heads[{index}].classes"
        if head.kind == "classification" and head.classes is None:
            message = f"{key}: the classification head {head.name!r} needs a number of classes"
            yield ConfigProblem((key, "model.heads"), message, "e.g. classes: 2")
        if head.kind == "regression" and head.classes is not None:
            message = f"{key}: head {head.name!r} is a regression, which has no classes"
            hint = "leave classes out, or say kind: classification"
            yield ConfigProblem((key, "model.heads"), message, hint)
        yield from _head_metrics(head, f"model.heads[{index}].metrics")
    of_graphs, of_nodes = (
        ", ".join(head.name for head in heads if head.level == level) for level in ("graph", "node")
    )
    if of_graphs and of_nodes:
        yield ConfigProblem(
            ("model.heads",),
            f"model.heads: {of_graphs} of graphs and {of_nodes} of nodes cannot be trained together: "
            "a loss is a mean over one or the other",
            "make them two runs",
        )


def _head_metrics(head: HeadConfig, key: str) -> Iterator[ConfigProblem]:
    metrics = get_args(ClassMetric if head.kind == "classification" else ValueMetric)
    if wrong := [metric for metric in head.metrics if metric not in metrics]:
        message = f"{key}: {', '.join(wrong)} is no metric of a {head.kind}"
        yield ConfigProblem((key, "model.heads"), message, f"there are {', '.join(metrics)}")
    if head.metrics and find_spec("torchmetrics") is None:
        hint = "pip install 'instar[metrics]', or leave it out"
        yield ConfigProblem((key, "model.heads"), f"{key} needs torchmetrics", hint)


def _shape(model: GraphModelConfig) -> Iterator[ConfigProblem]:
    if model.level == "graph" and not model.pooling:
        message = "model.pooling is empty: heads for graphs would have no input"
        yield ConfigProblem(("model.pooling",), message, "e.g. [mean, max]")
    if model.level == "graph" and model.mask is not None:
        message = "model.mask selects nodes, and these heads predict for graphs"
        hint = "leave it out, or set level: node in the heads"
        yield ConfigProblem(("model.mask",), message, hint)
    for kind, count in Counter(model.pooling).items():
        if count > 1:
            yield ConfigProblem(("model.pooling",), f"model.pooling has {kind} {count} times")
    if model.layer == "gat" and model.width % model.n_head:
        multiple = max(1, round(model.width / model.n_head)) * model.n_head
        message = f"model.width ({model.width}) must be divisible by model.n_head ({model.n_head})"
        hint = f"width {multiple} would be"
        yield ConfigProblem(("model.width", "model.n_head", "model.layer"), message, hint)


def causal_set_conflicts(options: CausalSetsConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield keys that contradict each other, with a message."""
    fewest_key, largest_key = (
        f"{CAUSAL_SETS_SECTION}.min_points",
        f"{CAUSAL_SETS_SECTION}.max_points",
    )
    if options.min_points > options.max_points:
        message = (
            f"{fewest_key} is {options.min_points}, more than {largest_key}, {options.max_points}"
        )
        yield (fewest_key, largest_key), message
    for name, values in (("dimensions", options.dimensions), ("features", options.features)):
        if len(set(values)) < len(values):
            yield (
                (f"{CAUSAL_SETS_SECTION}.{name}",),
                f"{CAUSAL_SETS_SECTION}.{name} has a duplicate value",
            )
