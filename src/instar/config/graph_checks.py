"""What contradicts itself in the config of a graph network, before any graph is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from instar.config.causal_sets import causal_set_checks
from instar.config.clash import Clash
from instar.config.graph import GraphConfig


def graph_clashes(config: GraphConfig) -> list[Clash]:
    """Everything about the model, its heads and its metrics that contradicts itself."""
    rules: tuple[Callable[[GraphConfig], Iterator[Clash]], ...] = (
        _names,
        _classes,
        _levels,
        _pooling,
        _attention,
        _causal_sets,
    )
    return [clash for rule in rules for clash in rule(config)]


def _names(config: GraphConfig) -> Iterator[Clash]:
    heads = config.model.heads
    if not heads:
        yield Clash(
            ("model.heads",),
            "model.heads is empty: there is nothing to learn",
            "e.g. - {name: manifold, kind: classification, classes: 2}",
        )
    for name, count in Counter(head.name for head in heads).items():
        if count > 1:
            yield Clash(
                ("model.heads",),
                f"model.heads: {count} heads are called {name!r}",
                "give each a name of its own; target says which column it reads",
            )


def _classes(config: GraphConfig) -> Iterator[Clash]:
    for index, head in enumerate(config.model.heads):
        key = f"model.heads[{index}].classes"
        if head.kind == "classification" and head.classes is None:
            yield Clash(
                (key, "model.heads"),
                f"{key}: head {head.name!r} is a classification and does not say how many classes",
                "e.g. classes: 2",
            )
        if head.kind == "regression" and head.classes is not None:
            yield Clash(
                (key, "model.heads"),
                f"{key}: head {head.name!r} is a regression, which has no classes",
                "leave classes out, or say kind: classification",
            )


def _levels(config: GraphConfig) -> Iterator[Clash]:
    of = {
        level: [head.name for head in config.model.heads if head.level == level]
        for level in ("graph", "node")
    }
    if of["graph"] and of["node"]:
        yield Clash(
            ("model.heads",),
            f"model.heads: {', '.join(of['graph'])} of graphs and {', '.join(of['node'])} of nodes "
            "cannot be trained together: a loss is a mean over one or the other",
            "make them two runs",
        )


def _pooling(config: GraphConfig) -> Iterator[Clash]:
    pooling, of_graphs = config.model.pooling, config.model.level == "graph"
    if of_graphs and not pooling:
        yield Clash(
            ("model.pooling",),
            "model.pooling is empty: heads for graphs would have nothing to read",
            "e.g. [mean, max]",
        )
    for kind, count in Counter(pooling).items():
        if count > 1:
            yield Clash(("model.pooling",), f"model.pooling has {kind} {count} times")


def _attention(config: GraphConfig) -> Iterator[Clash]:
    model = config.model
    if model.layer == "gat" and model.width % model.n_head:
        near = max(1, round(model.width / model.n_head)) * model.n_head
        yield Clash(
            ("model.width", "model.n_head", "model.layer"),
            f"model.width ({model.width}) must be divisible by model.n_head ({model.n_head})",
            f"width {near} would be",
        )


def _causal_sets(config: GraphConfig) -> Iterator[Clash]:
    if config.data.source == "causal_sets":
        yield from causal_set_checks(config.data.causal_sets, "data.causal_sets")
