"""Survey of all graphs before a run: their feature sizes, and all contradictions of the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instar.config.errors import ConfigError, ConfigProblem
from instar.data.columns import Column, Columns, Ragged, as_ragged
from instar.data.order import Int64Array
from instar.data.source import Source
from instar.extensions.graphs.config import GraphModelConfig, HeadConfig
from instar.record.progress import track_items

NO_CLASS = -1
"""Class of a graph or node without a target."""

_READ_AT_ONCE = 1024


@dataclass(frozen=True)
class GraphSurvey:
    """Number of features per node, per graph and per edge (0: none), and the mean size of the
    graphs."""

    features: int
    graph_features: int
    mean_nodes: float
    mean_edges: float
    mean_counted: float
    """Nodes of a graph to train on that count in the loss, those in `model.mask`; without one `mean_nodes`."""
    edge_features: int = 0


def survey_graphs(
    source: Source, splits: Mapping[str, Int64Array], model: GraphModelConfig
) -> GraphSurvey:
    """Read every sample of the splits once and check it against the config.

    Raises:
        ConfigError: lists every mistake with its column and the first sample that has it: columns
            that are missing or of another form; empty graphs and graphs over `model.max_nodes`;
            edges to nodes that do not exist; numbers that are not finite; classes outside
            0 … classes - 1 (or -1); and classes that no training sample has, if there is a
            training split.
    """
    faults = _Faults()
    present = {head.name: np.zeros(head.classes or 0, dtype=np.bool_) for head in model.heads}
    counted: list[Int64Array] = []
    samples = nodes = edges = features = graph_features = edge_features = 0
    for split, numbers in splits.items():
        begins = range(0, len(numbers), _READ_AT_ONCE)
        for begin in track_items(begins, f"checking the {split} split", "blocks", len(begins)):
            chunk = numbers[begin : begin + _READ_AT_ONCE]
            columns = source.read(chunk)
            if missing := [*_missing(columns, model)]:
                raise ConfigError(*missing)
            x, pairs = as_ragged(columns["x"]), as_ragged(columns["edges"])
            _check_graphs(faults, chunk, x, pairs, model)
            masked = None
            if model.mask is not None:
                masked = as_ragged(columns[model.mask])
                _check_sizes(faults, chunk, model.mask, masked, x, "booleans", "node")
                counts = true_counts(masked)
                faults.note(chunk[counts == 0], model.mask, "is true of no node")
                counted += [counts] * (split == "train")
            if model.edge_features:
                of_edges = as_ragged(columns["edge_attr"])
                _check_edge_features(faults, chunk, of_edges, pairs)
                edge_features = of_edges.values.shape[1]
            for head in model.heads:
                target, sample_of = _targets(faults, head, columns[head.column], x, chunk)
                if masked is not None and masked.flat.size == target.size:
                    target, sample_of = target[masked.flat], sample_of[masked.flat]
                _check_target(faults, head, target, sample_of)
                if split == "train" and head.classes:
                    classes = target[(target >= 0) & (target < head.classes)]
                    present[head.name][classes.astype(np.int64)] = True
            if model.graph_features:
                graph = np.asarray(columns["graph"])
                faults.note(chunk[~np.isfinite(graph).all(1)], "graph", "is not finite")
                graph_features = graph.shape[1]
            samples, features = samples + len(chunk), x.values.shape[1]
            nodes, edges = nodes + len(x.flat), edges + len(pairs.flat)
    problems = [*faults.problems()]
    if "train" in splits:
        problems += _unlearnable(model.heads, present)
    if problems:
        raise ConfigError(*problems)
    mean_nodes, mean_edges = nodes / samples, edges / samples
    mean_counted = float(np.concatenate(counted).mean()) if counted else mean_nodes
    return GraphSurvey(
        features, graph_features, mean_nodes, mean_edges, mean_counted, edge_features
    )


def _check_edge_features(
    faults: _Faults, chunk: Int64Array, features: Ragged, edges: Ragged
) -> None:
    _check_sizes(faults, chunk, "edge_attr", features, edges, "rows", "edge")
    infinite = ~np.isfinite(features.flat).all(1)
    faults.note(np.repeat(chunk, features.sizes)[infinite], "edge_attr", "is not finite")


def true_counts(column: Ragged) -> Int64Array:
    """Return how many values of each sample are true, int64 [samples]."""
    before = np.concatenate([[0], np.cumsum(column.values, dtype=np.int64)])
    counts: Int64Array = np.diff(before[column.offsets])
    return counts


@dataclass
class _Faults:
    """Mistakes by column and message, with their samples."""

    samples: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    details: dict[tuple[str, str], str] = field(default_factory=dict)

    def note(
        self,
        samples: NDArray[np.int64],
        column: str,
        message: str,
        details: Sequence[Any] | NDArray[Any] = (),
    ) -> None:
        """Add samples whose column has this mistake.

        Args:
            details: one per sample; the first replaces {} in the message.
        """
        if not len(samples):
            return
        key = column, message
        if key not in self.samples and len(details):
            self.details[key] = f"{details[0]}"
        self.samples.setdefault(key, []).extend(np.unique(samples).tolist())

    def problems(self) -> Iterator[ConfigProblem]:
        for (column, message), samples in self.samples.items():
            text = message.replace("{}", self.details.get((column, message), ""))
            more = len(samples) - 1
            more_text = f" ({more:,} more sample{'s' * (more > 1)} alike)" if more else ""
            yield ConfigProblem(
                (), f"sample {samples[0]}: {column} {text}{more_text}", place="data.source"
            )


@dataclass(frozen=True)
class _Wanted:
    """A required input column: its axes per sample, its NumPy dtype kinds, and the config key that
    requires it."""

    column: str
    axes: int
    kinds: str
    form: str
    key: str = "data.source"

    def fits(self, column: Column) -> bool:
        if isinstance(column, Mapping):
            return False
        is_ragged = isinstance(column, Ragged)
        values = column.values if isinstance(column, Ragged) else column
        pairs = self.column != "edges" or values.shape[-1] == 2
        return (
            values.ndim - (not is_ragged) == self.axes and values.dtype.kind in self.kinds and pairs
        )


def _requirements(model: GraphModelConfig) -> Iterator[_Wanted]:
    yield _Wanted("x", 2, "iuf", "numbers [nodes, features]")
    yield _Wanted("edges", 2, "iu", "pairs of node numbers [edges, 2]")
    if model.graph_features:
        yield _Wanted("graph", 1, "iuf", "numbers [features]", "model.graph_features")
    if model.edge_features:
        form = "numbers [edges, features]"
        yield _Wanted("edge_attr", 2, "iuf", form, "model.edge_features")
    if model.mask is not None:
        yield _Wanted(model.mask, 1, "b", "a boolean for each node", "model.mask")
    for index, head in enumerate(model.heads):
        what = "a class, a whole number," if head.classes else "a number"
        kinds = "iu" if head.classes else "iuf"
        form = f"{what} for each {head.level}"
        key = f"model.heads[{index}].target"
        yield _Wanted(head.column, int(head.level == "node"), kinds, form, key)


def _missing(columns: Columns, model: GraphModelConfig) -> Iterator[ConfigProblem]:
    """Yield a problem per required column that is missing or malformed; any samples will do."""
    for requirement in _requirements(model):
        column = columns.get(requirement.column)
        if column is None:
            hint = f"there are {', '.join(columns) or 'none'}"
            message = (
                f"samples have no column {requirement.column!r}; it should hold {requirement.form}"
            )
        elif not requirement.fits(column):
            hint = ""
            message = f"column {requirement.column!r} does not hold {requirement.form}"
        else:
            continue
        yield ConfigProblem((requirement.key,), message, hint, place=requirement.key)


def _check_graphs(
    faults: _Faults, numbers: Int64Array, x: Ragged, edges: Ragged, model: GraphModelConfig
) -> None:
    sizes = x.sizes
    faults.note(numbers[sizes == 0], "x", "has no nodes")
    if model.max_nodes is not None:
        large = sizes > model.max_nodes
        message = f"has {{}} nodes, more than model.max_nodes: {model.max_nodes}"
        faults.note(numbers[large], "x", message, sizes[large])
    finite = np.isfinite(x.flat).all(1)
    faults.note(np.repeat(numbers, sizes)[~finite], "x", "has a number that is not finite")
    count = np.repeat(sizes, edges.sizes)[:, None]
    outside = ((edges.flat < 0) | (edges.flat >= count)).any(1)
    message = "leads to a node that its graph does not have: {}"
    details = [tuple(pair) for pair in edges.flat[outside][:1].tolist()]
    faults.note(np.repeat(numbers, edges.sizes)[outside], "edges", message, details)


def _targets(
    faults: _Faults, head: HeadConfig, column: Any, x: Ragged, numbers: Int64Array
) -> tuple[NDArray[Any], Int64Array]:
    """Return a head's concatenated targets and the sample number of each."""
    if head.level == "graph":
        return column, numbers
    of_nodes = as_ragged(column)
    _check_sizes(faults, numbers, head.column, of_nodes, x, "targets", "node")
    return of_nodes.flat, np.repeat(numbers, of_nodes.sizes)


def _check_sizes(
    faults: _Faults,
    numbers: Int64Array,
    name: str,
    column: Ragged,
    of: Ragged,
    what: str,
    unit: str,
) -> None:
    """Note samples in which a column has not as many values as another one."""
    other = column.sizes != of.sizes
    message = f"has {{}} {what}, which is not one for each {unit}"
    faults.note(numbers[other], name, message, column.sizes[other])


def _check_target(
    faults: _Faults, head: HeadConfig, target: NDArray[Any], sample_of: Int64Array
) -> None:
    if head.classes is None:
        wrong = ~np.isfinite(target)
        message = "is {}, which is no target of a regression"
    else:
        wrong = (target < NO_CLASS) | (target >= head.classes)
        message = f"is class {{}}; head {head.name!r} has 0 to {head.classes - 1}, or -1 for none"
    faults.note(sample_of[wrong], head.column, message, target[wrong])


def _unlearnable(
    heads: Sequence[HeadConfig], present: Mapping[str, NDArray[np.bool_]]
) -> Iterator[ConfigProblem]:
    for index, head in enumerate(heads):
        absent = np.flatnonzero(~present[head.name])
        if absent.size:
            key = f"model.heads[{index}].classes"
            classes = ", ".join(map(str, absent))
            message = f"{key}: no training sample has class {classes} in column {head.column!r}"
            hint = "fewer classes, more samples, or data.stratify so that all splits have all"
            yield ConfigProblem((key,), message, hint, place="data.source")
