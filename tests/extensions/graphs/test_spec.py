"""What is known of a run on graphs before torch is there: their number, weights, splits, cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from instar.config.errors import ConfigError
from instar.config.fields import values
from instar.config.load import Loaded, load_config
from instar.data.columns import Columns, Ragged
from instar.extensions.graphs.arrays import write_arrays
from instar.extensions.graphs.config import GraphConfig, GraphModelConfig
from instar.extensions.graphs.shape import GraphShape, flops_per_graph, resolve_graph
from instar.extensions.graphs.spec import GraphSpec, NodeCounts

SIZES = np.array([3, 4, 5, 6] * 10)
KIND = "model.heads=[{name: kind, kind: classification, classes: 2}]"
OF_NODES = "model.heads=[{name: mark, kind: classification, classes: 2, level: node}]"


def paths() -> Columns:
    """Forty paths of three to six nodes, of two kinds, half of whose nodes are marked."""
    offsets = np.concatenate([[0], np.cumsum(SIZES)])
    edges = np.concatenate([np.stack([np.arange(n - 1), np.arange(1, n)], axis=1) for n in SIZES])
    return {
        "x": Ragged(np.ones((offsets[-1], 2), dtype=np.float32), offsets),
        "edges": Ragged(edges, np.concatenate([[0], np.cumsum(SIZES - 1)])),
        "kind": np.arange(40) % 2,
        "mark": Ragged(np.arange(offsets[-1]) % 2, offsets),
    }


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_arrays(tmp_path / "paths", [paths()], {"kind": "paths"})
    return tmp_path / "paths"


def config(source: Path | str, *options: str) -> Loaded:
    return load_config(None, ["task=graph", f"data.source={source}", KIND, *options])


def test_graphs_are_split_and_looked_at(store: Path) -> None:
    spec = GraphSpec.open(config(store, "data.val=0.25", "data.test=10"), 1)
    assert {name: numbers.size for name, numbers in spec.data.splits.items()} == {
        "train": 20,
        "val": 10,
        "test": 10,
    }
    assert (spec.unit, spec.samples(1), spec.weight(1)) == ("graph", 20, 1)
    assert (spec.survey.mean_nodes, spec.survey.mean_edges) == (4.5, 3.5)
    assert spec.derived["data.path"] == str(store)
    source = spec.data.held_out("val")
    assert source.weights(np.arange(len(source))) == 10


CITATIONS = """
import torch
from torch_geometric.data import Data

def papers():
    graph = Data(x=torch.eye(6), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]))
    graph.mark = torch.tensor([0, 1, 0, 1, 0, 1])
    places = {"train": [0, 1, 2], "val": [3, 4], "test": [5]}
    return {
        name: [graph.clone().update({"known": torch.isin(torch.arange(6), torch.tensor(nodes))})]
        for name, nodes in places.items()
    }
"""


def test_one_graph_may_be_in_every_split_with_a_mask_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "citations.py").write_text(CITATIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = GraphSpec.open(config("citations:papers", OF_NODES, "model.mask=known"), 1)
    assert spec.split_sizes(1) == {"train": 1, "val": 1, "test": 1}
    train, _ = spec.train(1, 0)
    assert train.weights(np.array([0])) == 3
    weights = [spec.held_out(split, 1).weights(np.array([0])) for split in ("val", "test")]
    assert weights == [2, 1]
    # the work is that of all six nodes, whether they count or not
    assert spec.weight(1) == 3
    per_graph = flops_per_graph(spec.architecture, 6, 4)
    assert spec.flops(spec.architecture, 1) == round(per_graph / 3)
    assert spec.task(spec.config).flops(3.0) == pytest.approx(per_graph)


def test_graphs_of_one_size_may_be_stored_as_dense_arrays(tmp_path: Path) -> None:
    dense = {"x": np.ones((40, 3, 2)), "edges": np.zeros((40, 1, 2), np.int64)}
    write_arrays(tmp_path / "dense", [{**dense, "kind": np.arange(40) % 2}], {})
    spec = GraphSpec.open(config(tmp_path / "dense"), 1)
    assert spec.data.costs is not None
    assert spec.data.costs.tolist() == [3] * 40


def test_heads_for_nodes_weigh_graphs_by_their_nodes(store: Path) -> None:
    spec = GraphSpec.open(config(store, OF_NODES), 1)
    assert (spec.unit, spec.weight(1)) == ("node", 4.5)
    source, order = spec.data.train(0)
    numbers = spec.data.splits["train"][order.indices(0, 0, 5)]
    assert source.weights(order.indices(0, 0, 5)) == SIZES[numbers].sum()


def test_classes_are_in_all_splits_alike(store: Path) -> None:
    spec = GraphSpec.open(config(store, "data.stratify=kind", "data.val=8", "data.test=8"), 1)
    for numbers in spec.data.splits.values():
        assert np.bincount(numbers % 2).tolist() == [numbers.size // 2] * 2
    with pytest.raises(ConfigError, match="'colour'"):
        GraphSpec.open(config(store, "data.stratify=colour"), 1)


def test_a_function_gives_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_graphs.py").write_text("from test_spec import paths\n")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    spec = GraphSpec.open(config("my_graphs:paths", "data.stratify=kind"), 1)
    assert len(spec.data.source) == 40
    assert spec.derived["data.path"] is None


def test_causal_sets_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = (
        "data.causal_sets.sets=60",
        "data.causal_sets.min_points=8",
        "data.causal_sets.max_points=12",
    )
    run_config = load_config(None, ["task=graph", *overrides])
    messages: list[str] = []
    guess = GraphSpec.assume(run_config, messages.append)
    assert "causal_sets stand in for them" in messages[0]
    assert list(tmp_path.iterdir()) == []
    GraphSpec.prepare(run_config, 1, messages.append)
    (folder,) = (tmp_path / "data").iterdir()
    spec = GraphSpec.open(run_config, 1)
    assert spec.derived["data.path"] == f"data/{folder.name}"
    assert guess.architecture == spec.architecture
    assert guess.samples(1) == spec.samples(1) == 48
    assert guess.split_sizes(1) == spec.split_sizes(1)
    assert isinstance(GraphSpec.assume(run_config, messages.append), GraphSpec)


def test_a_store_that_is_not_there_is_named_by_its_key(store: Path) -> None:
    with pytest.raises(ConfigError, match=rf"source.* is not there[\s\S]*did you mean '{store}'"):
        GraphSpec.open(config(store.parent / "path"), 1)


def test_nothing_of_it_needs_torch(store: Path) -> None:
    program = (
        "import sys; from instar.config.load import load_config; from instar.run.start.preflight import preflight\n"
        f"preflight(load_config(None, ['task=graph', 'data.source={store}', '{KIND}',"
        " 'train.until=[2it]', 'record.run_dir=none']), 1)\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_run_imports_no_other_framework(store: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from instar import api\n"
        f"api.train(None, ['task=graph', 'data.source={store}', '{KIND}', 'device=cpu',"
        f" 'train.until=[2it]', 'record.run_dir={tmp_path / 'run'}'])\n"
        "print({'torch_geometric', 'transformers', 'torch._dynamo'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "set()"


def test_a_grown_shape_is_described_by_a_section() -> None:
    config = GraphConfig(model=GraphModelConfig(layer="gin", pooling=("sum",), dropout=0.1))
    initial = resolve_graph(config.model, features=5)
    larger = GraphShape.from_dict({**initial.to_dict(), "width": 48, "mlp": 100, "layers": 4})
    section = GraphSpec.section(values(config), larger.to_dict())
    assert resolve_graph(GraphModelConfig.model_validate_json(json.dumps(section)), 5) == larger


def test_nodes_are_counted_in_the_graphs_as_transformed() -> None:
    columns = {"x": np.zeros((3, 4, 2)), "known": np.array([[1, 0, 0, 1]] * 3, dtype=bool)}
    assert NodeCounts(None).weights(columns).tolist() == [4, 4, 4]
    assert NodeCounts("known").weights(columns).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="there is no known"):
        NodeCounts("known").check({"x": columns["x"][0]})
