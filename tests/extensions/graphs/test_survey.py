"""Bad graphs are told by sample and column before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from instar.config.errors import ConfigError
from instar.data.columns import Column, Columns, Ragged, pick
from instar.data.order import Int64Array
from instar.extensions.graphs.config import GraphModelConfig, HeadConfig
from instar.extensions.graphs.survey import GraphSurvey, survey_graphs

MODEL = GraphModelConfig(
    heads=(
        HeadConfig(name="kind", kind="classification", classes=2),
        HeadConfig(name="size", kind="regression"),
    )
)
NODES = GraphModelConfig(
    heads=(HeadConfig(name="role", kind="classification", classes=2, level="node"),)
)
SPLITS = {"train": np.array([0, 2, 3]), "val": np.array([1]), "test": np.array([], dtype=np.int64)}


class Held:
    """Columns in memory."""

    fingerprint = "held"

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return 4

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        del epoch
        return pick(self.columns, indices)

    def weights(self, indices: Int64Array) -> float:
        return float(len(indices))


def ragged(values: Any, sizes: list[int], dtype: Any) -> Ragged:
    array = np.array(values, dtype=dtype)
    return Ragged(array, np.cumsum([0, *sizes]).astype(np.int64))


def good() -> dict[str, Column]:
    """Four graphs of 2, 1, 3 and 2 nodes."""
    return {
        "x": ragged([[0.5], [1], [2], [3], [4], [5], [6], [7]], [2, 1, 3, 2], np.float32),
        "edges": ragged([[0, 1], [0, 1], [2, 0], [1, 0]], [1, 0, 2, 1], np.int64),
        "kind": np.array([0, -1, 1, 1]),
        "size": np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32),
        "role": ragged([0, 1, 1, 0, 0, 1, -1, 1], [2, 1, 3, 2], np.int64),
        "graph": np.zeros((4, 5), dtype=np.float32),
    }


def survey(columns: Columns, model: GraphModelConfig = MODEL) -> GraphSurvey:
    return survey_graphs(Held(columns), SPLITS, model)


def test_what_good_graphs_are_like() -> None:
    assert survey(good()) == GraphSurvey(1, 0, mean_nodes=2.0, mean_edges=1.0, mean_counted=2.0)
    model_config = MODEL.model_copy(update={"graph_features": True})
    assert survey(good(), model_config).graph_features == 5


def test_features_of_edges_and_masks_are_checked() -> None:
    model_config = NODES.model_copy(update={"edge_features": True, "mask": "known"})
    fine = {
        "edge_attr": ragged([[0, 1]] * 4, [1, 0, 2, 1], np.float32),
        "known": ragged([1, 0, 1, 0, 0, 1, 1, 1], [2, 1, 3, 2], np.bool_),
    }
    assert survey({**good(), **fine}, model_config).edge_features == 2
    wrong = {
        "edge_attr": ragged([[0, np.inf]] * 4, [1, 1, 1, 1], np.float32),
        "known": ragged([0, 0, 1, 0, 0, 1, 1, 1], [2, 1, 3, 2], np.bool_),
    }
    with pytest.raises(ConfigError) as caught:
        survey({**good(), **wrong}, model_config)
    message = str(caught.value)
    assert (
        "sample 2: edge_attr has 1 rows, which is not one for each edge (1 more sample" in message
    )
    assert "edge_attr is not finite" in message
    assert "sample 0: known is true of no node" in message
    with pytest.raises(
        ConfigError, match="samples have no column 'known'; it should hold a boolean"
    ):
        survey(good(), NODES.model_copy(update={"mask": "known"}))


def test_graphs_of_one_size_may_come_as_dense_arrays() -> None:
    columns = good() | {"x": np.zeros((4, 3, 2)), "edges": np.zeros((4, 0, 2), dtype=np.int64)}
    assert survey(columns) == GraphSurvey(2, 0, mean_nodes=3.0, mean_edges=0.0, mean_counted=3.0)


NODES = GraphModelConfig(
    heads=(HeadConfig(name="role", kind="classification", classes=2, level="node"),)
)

BAD: list[tuple[str, GraphModelConfig, Mapping[str, Any], str]] = [
    (
        "no target",
        MODEL,
        {"size": None},
        r"model.heads\[1\].target: samples have no column 'size'; it should hold a number for each "
        "graph; there are x, edges, kind",
    ),
    ("no edges", MODEL, {"edges": None}, "data.source: samples have no column 'edges'"),
    (
        "float classes",
        MODEL,
        {"kind": np.zeros(4, dtype=np.float32)},
        r"model.heads\[0\].target: column 'kind' does not hold a class, a whole number, for each",
    ),
    (
        "target of nodes",
        MODEL,
        {"size": ragged(range(8), [2, 1, 3, 2], np.float32)},
        "column 'size' does not hold a number for each graph",
    ),
    (
        "triples",
        MODEL,
        {"edges": ragged([[0, 1, 0]], [1, 0, 0, 0], np.int64)},
        r"column 'edges' does not hold pairs of node numbers \[edges, 2\]",
    ),
    (
        "nan target",
        MODEL,
        {"size": np.array([0, 1, np.nan, np.inf], dtype=np.float32)},
        "sample 2: size is nan, which is no target of a regression \\(1 more sample alike\\)",
    ),
    (
        "infinite target of a held-out sample",
        MODEL,
        {"size": np.array([0, -np.inf, 0, 0], dtype=np.float32)},
        "sample 1: size is -inf",
    ),
    (
        "class too large",
        MODEL,
        {"kind": np.array([0, 1, 2, 1])},
        "sample 2: kind is class 2; head 'kind' has 0 to 1, or -1 for none",
    ),
    ("class below", MODEL, {"kind": np.array([0, 1, 1, -2])}, "sample 3: kind is class -2"),
    (
        "class only held out",
        MODEL,
        {"kind": np.array([0, 1, 0, 0])},
        r"model.heads\[0\].classes: no training sample has class 1 in column 'kind'",
    ),
    (
        "no nodes",
        MODEL,
        {
            "x": ragged(np.ones((5, 1)), [0, 1, 3, 1], np.float32),
            "edges": ragged(np.zeros((0, 2)), [0, 0, 0, 0], np.int64),
        },
        "sample 0: x has no nodes",
    ),
    (
        "too many nodes",
        MODEL.model_copy(update={"max_nodes": 2}),
        {},
        "sample 2: x has 3 nodes, more than model.max_nodes: 2",
    ),
    (
        "nan feature",
        MODEL,
        {"x": ragged([[1], [1], [1], [1], [1], [np.nan], [1], [1]], [2, 1, 3, 2], np.float32)},
        "sample 2: x has a number that is not finite",
    ),
    (
        "edge to nowhere",
        MODEL,
        {"edges": ragged([[0, 1], [0, 1], [0, 1]], [1, 1, 0, 1], np.int64)},
        r"sample 1: edges leads to a node that its graph does not have: \(0, 1\)",
    ),
    (
        "no features of graphs",
        MODEL.model_copy(update={"graph_features": True}),
        {"graph": None},
        "model.graph_features: samples have no column 'graph'",
    ),
    (
        "nan features of graphs",
        MODEL.model_copy(update={"graph_features": True}),
        {"graph": np.array([[0.0], [0.0], [0.0], [np.nan]])},
        "sample 3: graph is not finite",
    ),
    (
        "a target for some nodes",
        NODES,
        {"role": ragged([0, 1, 1, 0, 0, 1, -1], [2, 1, 3, 1], np.int64)},
        "sample 3: role has 1 targets, which is not one for each node",
    ),
    (
        "class of nodes",
        NODES,
        {"role": ragged([0, 1, 1, 0, 7, 9, -1, 0], [2, 1, 3, 2], np.int64)},
        "sample 2: role is class 7; head 'role' has 0 to 1",
    ),
]


@pytest.mark.parametrize(
    ("model", "changes", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
def test_what_is_wrong_is_told(
    model: GraphModelConfig, changes: Mapping[str, Any], message: str
) -> None:
    columns = {name: column for name, column in (good() | changes).items() if column is not None}
    with pytest.raises(ConfigError, match=message) as error:
        survey(columns, model)
    assert len(error.value.problems) == 1


def test_where_nothing_is_trained_on_no_class_is_missing() -> None:
    columns = Held(good() | {"kind": np.zeros(4, dtype=np.int64)})
    assert survey_graphs(columns, {"val": np.arange(4)}, MODEL).features == 1


def test_all_mistakes_are_told_at_once() -> None:
    columns = good() | {
        "size": np.array([np.nan, 0, 0, 0], dtype=np.float32),
        "kind": np.array([0, 5, 0, 0]),
        "edges": ragged([[0, 2]], [0, 0, 0, 1], np.int64),
    }
    with pytest.raises(ConfigError) as error:
        survey(columns, MODEL.model_copy(update={"max_nodes": 2}))
    message = " ".join(str(problem) for problem in error.value.problems)
    assert len(error.value.problems) == 5
    for part in ("2: x has 3", "3: edges", "1: kind is class 5", "0: size", "has class 1"):
        assert part in message
    missing = {name: good()[name] for name in ("x", "size")}
    with pytest.raises(ConfigError) as error:
        survey(missing)
    assert len(error.value.problems) == 2
