"""Samples in the forms that people have them, splits of their own, and streams of samples."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from pandas import DataFrame
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, random_split
from torch_geometric.data import Batch, HeteroData, InMemoryDataset
from torch_geometric.data import Data as Graph
from torch_geometric.loader import DataLoader as GraphLoader

from instar.config.errors import ConfigError
from instar.config.schema import SamplesConfig
from instar.data.columns import Ragged, ragged_names
from instar.data.loader import LocalReader, ReadRequest, StepKey
from instar.data.text.streams.samples import StreamChanged
from instar.data.user_sets import SampleSet, StreamedSet, sample_set
from instar.data.user_source import MOST_ITEMS, as_source

X = np.arange(40, dtype=np.float32).reshape(20, 2)
Y = np.arange(20) % 3
Pair = namedtuple("Pair", "x y")


@dataclass
class Row:
    x: Any
    y: Any


class Reading(IterableDataset[Any]):
    """Items 0 to n - 1, or without end."""

    def __init__(self, n: int | None) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while self.n is None or number < self.n:
            yield torch.full((2,), float(number)), number
            number += 1


def tensors() -> TensorDataset:
    return TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


FORMS: dict[str, Callable[[], Any]] = {
    "arrays": lambda: {"x": X, "y": Y},
    "pairs": lambda: list(zip(X, Y, strict=True)),
    "named tuples": lambda: [Pair(x, y) for x, y in zip(X, Y, strict=True)],
    "dataclasses": lambda: [Row(torch.from_numpy(x), y) for x, y in zip(X, Y, strict=True)],
    "dictionaries": lambda: [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)],
    "a generator": lambda: ({"x": x, "y": y} for x, y in zip(X, Y, strict=True)),
    "a TensorDataset": tensors,
    "a Subset": lambda: Subset(tensors(), range(20)),
    "a DataLoader": lambda: DataLoader(tensors(), batch_size=7, shuffle=True),
    "a Dataset of datasets": lambda: datasets.Dataset.from_dict({"x": X.tolist(), "y": Y}),
    "an IterableDataset of datasets": lambda: (
        datasets.Dataset.from_dict({"x": X.tolist(), "y": Y})
        .to_iterable_dataset()
        .with_format("numpy")
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_samples_is_the_same_samples(form: str) -> None:
    source = as_source(FORMS[form]())
    assert len(source) == 20
    columns = source.read(np.array([3, 0, 19]))
    np.testing.assert_array_equal(columns["x"], X[[3, 0, 19]], strict=True)
    np.testing.assert_array_equal(columns["y"], Y[[3, 0, 19]], strict=True)


def test_a_table_is_read_by_its_columns() -> None:
    columns = as_source(DataFrame({"height": X[:, 0], "y": Y})).read(np.array([1]))
    assert columns["height"] == X[1, 0]


def molecules(n: int) -> list[Graph]:
    return [
        Graph(
            x=torch.full((2 + k % 3, 4), float(k)),
            edge_index=torch.tensor([[0, 1], [1, 0]]),
            edge_attr=torch.full((2, 3), float(k)),
            y=torch.tensor([[float(k), 0.0]]),
            smiles="C" * k,
            num_nodes=2 + k % 3,
        )
        for k in range(1, n + 1)
    ]


@pytest.mark.parametrize(
    "samples", [molecules, lambda n: iter(molecules(n)), lambda n: GraphLoader(molecules(n), 4)]
)
def test_graphs_are_ragged_and_their_text_is_left_out(samples: Callable[[int], Any]) -> None:
    columns = as_source(samples(6)).read(np.array([1, 4]))
    assert set(columns) == {"x", "edges", "edge_attr", "y"}
    edge_attr, y = columns["edge_attr"], columns["y"]
    assert isinstance(edge_attr, Ragged)
    assert edge_attr.sizes.tolist() == [2, 2]
    np.testing.assert_array_equal(y, [[2.0, 0.0], [5.0, 0.0]])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            [{"text": "two words"}],
            "sample 0: text is 'two words', which is no array of numbers; encode",
        ),
        (
            [{"x": 1, "y": None}],
            "y is None, which is no array of numbers; every sample needs a value",
        ),
        (
            [(X[0], 1), (X[:2], 1)],
            r"sample 1: x is float32\[2, 2\], in the first sample float32\[2\]",
        ),
        ([(X[0], 1), (X[0], 1.5)], r"sample 1: y is float64\[\], in the first sample int64\[\]"),
        ({"x": X, "y": Y[:-1]}, "columns must have the same number of samples, got x 20, y 19"),
        (
            DataLoader(tensors(), sampler=range(3)),
            "a DataLoader with a range, which would not be used",
        ),
        (3, "a int; return arrays by name"),
        (Row, "the class Row, not an object of it"),
        (tensors, "a function, not what it returns"),
        ([(X[0], 1), None], "sample 1 is None; return mappings, tuples or dataclasses of arrays"),
        (molecules(1)[0], r"a single graph, where a sample is a graph: return \[graph\]"),
        ([HeteroData()], "sample 0 is a HeteroData; return the arrays of each type by name"),
        (random_split(tensors(), [15, 5]), "sample 0 is a Subset; data sets of splits are named"),
        ({"training": tensors()}, "training is a TensorDataset, .*; data sets of splits are named"),
    ],
)
def test_what_is_wrong_with_samples_is_said(samples: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_source(samples)


def split(samples: Any, **data: Any) -> SampleSet | StreamedSet:
    def make() -> Any:
        return samples() if callable(samples) else samples

    return sample_set(make, make(), (), SamplesConfig(**data), seed=5)


def test_splits_that_are_given_are_kept_and_others_are_drawn() -> None:
    tables = {name: datasets.Dataset.from_dict({"x": X[:n]}) for name, n in PARTS.items()}
    dataset = split(datasets.DatasetDict(tables), test=2)
    assert isinstance(dataset, SampleSet)
    assert {name: dataset.size(name) for name in dataset.splits} == {
        "train": 18,
        "val": 5,
        "test": 2,
    }
    np.testing.assert_array_equal(dataset.held_out("val").read(np.arange(5))["x"], X[:5])
    train, _ = dataset.train(seed=1)
    assert len(np.unique(train.read(np.arange(18))["x"], axis=0)) == 18


PARTS = {"train": 20, "validation": 5}


def test_parts_of_random_split_are_splits() -> None:
    train, val, test = random_split(tensors(), [12, 4, 4])
    dataset = split({"train": train, "val": val, "test": test})
    assert [dataset.size(name) for name in ("train", "val", "test")] == [12, 4, 4]


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (
            {"train": tensors(), "unlabelled": tensors()},
            "a data set unlabelled besides train; splits",
        ),
        (
            {"train": tensors(), "val": tensors(), "valid": tensors()},
            "two of these are the same split",
        ),
        ({"train": tensors(), "val": Subset(tensors(), [])}, "there are no samples"),
        ({"train": tensors(), "val": [(X[0], 0.5)]}, "val has y as float64, not int64 as in train"),
    ],
)
def test_what_is_wrong_with_splits_is_said(splits: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(splits)


def test_an_array_called_train_is_a_column() -> None:
    assert split({"train": X, "side": Y}, val=2).size("val") == 2


# ---- streams ----


def stream(train: Any, **data: Any) -> StreamedSet:
    dataset = split(
        lambda: {"train": train() if callable(train) else train, "val": tensors()}, **data
    )
    assert isinstance(dataset, StreamedSet)
    return dataset


def read_numbers(
    dataset: StreamedSet,
    cursor: int,
    steps: int,
    rank: int = 0,
    ranks: int = 1,
    drop_last: bool = False,
) -> list[int]:
    """The numbers of the samples that a rank reads in some steps of six, from a cursor on."""
    source, order = dataset.train(seed=3)
    reader = LocalReader(source, order, ranks, range(rank, rank + 1), "test", drop_last)
    numbers: list[int] = []
    for _ in range(steps):
        key = StepKey(cursor, 6, 6)
        step = reader.read(ReadRequest(0, key, False))[key]
        if isinstance(step, Exception):
            raise step
        for micro in step.micro_batches:
            column = micro.arrays["y"]
            assert isinstance(column, np.ndarray)
            numbers += column[: micro.samples].tolist()
        cursor = step.plan.after
    return numbers


ITERABLES: dict[str, Any] = {
    "an IterableDataset": Reading(20),
    "a generator": lambda: iter(Reading(20)),
    "a loader": DataLoader(Reading(20), batch_size=3),
}


@pytest.mark.parametrize("kind", ITERABLES)
@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_a_stream_resumes_at_any_place_of_any_pass(kind: str, order: str) -> None:
    dataset = stream(ITERABLES[kind], order=order, shuffle_window=8)
    numbers = read_numbers(dataset, 0, 8)  # 6, 6, 6, 2 samples in each pass
    assert sorted(numbers[:20]) == sorted(numbers[20:]) == list(range(20))
    assert (numbers[:20] == list(range(20))) == (order == "sequential")
    assert read_numbers(dataset, 12, 3) == numbers[12:26]
    assert read_numbers(dataset, 32, 1) == numbers[32:38]


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_a_stream_leaves_out_the_rest_of_a_pass_though_its_length_is_not_known(order: str) -> None:
    dataset = stream(Reading(20), order=order, shuffle_window=8)
    numbers = read_numbers(dataset, 0, 8)
    full_batches = read_numbers(dataset, 0, 6, drop_last=True)  # 6, 6, 6 samples in each pass
    assert full_batches == numbers[:18] + numbers[20:38]
    for cursor, steps in ((12, 4), (18, 3), (20, 3), (32, 1)):
        begin = {12: 12, 18: 18, 20: 18, 32: 30}[cursor]
        assert (
            read_numbers(dataset, cursor, steps, drop_last=True)
            == full_batches[begin : begin + 6 * steps]
        )


def test_ranks_share_the_samples_of_a_stream() -> None:
    dataset = stream(Reading(20), shuffle_window=8)
    of_ranks = [read_numbers(dataset, 0, 4, rank, 2) for rank in range(2)]
    assert sorted(of_ranks[0] + of_ranks[1]) == list(range(20))
    assert of_ranks[0][:3] + of_ranks[1][:3] == read_numbers(dataset, 0, 1)


def test_a_stream_need_not_end() -> None:
    assert read_numbers(stream(Reading(None), order="sequential"), 6_000, 1) == list(
        range(6_000, 6_006)
    )
    assert stream(Reading(None)).size("train") is None


def test_a_function_may_begin_each_pass() -> None:
    def numbers() -> Iterable[Any]:
        return Reading(9)

    splits = {"train": numbers, "val": tensors()}
    dataset = sample_set(lambda: splits, splits, (), SamplesConfig(order="sequential"), seed=1)
    assert isinstance(dataset, StreamedSet)
    assert read_numbers(dataset, 0, 3) == [*range(9), *range(6)]


def test_a_stream_that_changes_is_refused() -> None:
    passes = [range(9), range(9), (0, 1, 5)]
    dataset = stream(lambda: ((X[0], n) for n in passes.pop(0)))
    with pytest.raises(StreamChanged, match="item 2 is not what it was"):
        read_numbers(dataset, 0, 1)


class Words:
    """Sample i has 3 words, or 5 where i modulo 8 is 4 or more."""

    def __init__(self, n: int, size: int | None = None) -> None:
        self.n, self.size = n, size

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"words": np.arange(self.size or (3 if i % 8 < 4 else 5)), "y": i}


def test_whether_a_column_is_ragged_does_not_depend_on_what_is_read() -> None:
    for samples in (Words(40), [Words(40)[i] for i in range(40)]):
        source = as_source(samples)
        for ids in ([0], [0, 1], [3, 4]):
            assert ragged_names(source.read(np.array(ids))) == {"words"}
    dense_source = as_source(Words(4, size=3))
    assert ragged_names(dense_source.read(np.arange(4))) == frozenset()


def test_lists_of_numbers_have_the_type_of_one_array() -> None:
    lists = {
        "x": [[0.5, 1.0], [1, 2], [3, 4]],
        "y": [1, 0.5, 2],
        "z": [True, 2, False],
        "tokens": [[1, 2], [], [3]],
        "scores": [[], [1], [0.5, 2]],
    }
    columns = as_source(lists).read(np.arange(3))
    for name in "xyz":
        expected = np.array(lists[name])
        np.testing.assert_array_equal(columns[name], expected)  # type: ignore[arg-type]
        assert columns[name].dtype == expected.dtype  # type: ignore[union-attr]
    for name, dtype in (("tokens", np.int64), ("scores", np.float64)):
        ragged = columns[name]
        assert isinstance(ragged, Ragged)
        assert ragged.flat.dtype == dtype
        assert [row.tolist() for row in (ragged[i : i + 1].flat for i in range(3))] == lists[name]
    with pytest.raises(ValueError, match="the type and all axes but the first must be alike"):
        as_source({"x": [[[1], [2]], [[1, 2]]]})


@pytest.mark.parametrize("train", [Words(40), (lambda: map(Words(40).__getitem__, range(40)))])
def test_splits_have_the_same_columns_ragged(train: Any) -> None:
    for first, second in ((train, Words(9, size=3)), (Words(9, size=3), Words(40))):
        dataset = split({"train": first, "val": second})
        of_train, order = dataset.train(1)
        if isinstance(dataset, StreamedSet):
            order.explore(0, 1)  # type: ignore[attr-defined]
        for part in (of_train, dataset.held_out("val")):
            assert ragged_names(part.read(np.array([0]))) == {"words"}


def test_a_sample_of_another_size_than_all_before_is_named() -> None:
    class Odd(Words):
        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"words": np.arange(4 if i == 98 else 3), "y": i}

    message = "sample 98: words has 4 rows, sample 97 has 3; .* pad all samples to one size"
    with pytest.raises(ValueError, match=message):
        as_source(Odd(200)).read(np.array([97, 98]))
    dataset = stream(lambda: lambda: map(Odd(200).__getitem__, range(200)), order="sequential")
    with pytest.raises(ValueError, match="sample 98: words has 4 rows"):
        read_numbers(dataset, 0, 20)


def test_an_error_of_the_iterable_says_how_far_it_came() -> None:
    def items() -> Iterator[Any]:
        yield from Reading(70)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as error:
        read_numbers(stream(lambda: items, order="sequential"), 66, 1)
    assert "after 70 items of the iterable" in error.value.__notes__


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"order": "blocks"}, "data.order blocks needs random access"),
        ({"workers": 2}, "an iterable is read by one process"),
        ({"stratify": "y"}, "splits of an iterable are given, not drawn"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stream(Reading(9), **data)


def test_a_split_is_not_drawn_from_a_stream() -> None:
    with pytest.raises(ConfigError, match="gives no test split, which cannot"):
        stream(Reading(9)).held_out("test")


def test_an_iterable_without_splits_must_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_ITEMS > 10**6
    monkeypatch.setattr("instar.data.user_source.MOST_ITEMS", 30)
    assert len(as_source(Reading(30))) == 30
    with pytest.raises(ValueError, match="more than 30 samples is not read into memory"):
        as_source(Reading(None))


def test_nodes_of_graphs_without_features_are_counted() -> None:
    edges = torch.tensor([[0, 1], [1, 0]])
    graphs = [Graph(edge_index=edges, num_nodes=4 + k % 3, y=torch.tensor([k])) for k in range(6)]
    for samples in (graphs, iter(graphs)):
        columns = as_source(samples).read(np.arange(6))
        np.testing.assert_array_equal(columns["num_nodes"], [4, 5, 6, 4, 5, 6])
    graphs[0] = Graph(x=torch.zeros(3, 2), edge_index=edges, num_nodes=4)
    with pytest.raises(ValueError, match="num_nodes is 4, but there are 3 rows of features"):
        as_source(graphs[:1])


def test_a_cloud_of_points_is_a_graph_without_edges() -> None:
    clouds = [Graph(pos=torch.full((2 + k, 3), float(k)), y=torch.tensor([k])) for k in range(5)]
    for samples in (clouds, iter(clouds)):
        columns = as_source(samples).read(np.array([3, 0]))
        assert set(columns) == {"pos", "y"}
        position = columns["pos"]
        assert isinstance(position, Ragged)
        assert position.sizes.tolist() == [5, 2]
    stream_of_clouds = stream(lambda: lambda: iter(clouds), order="sequential")
    assert ragged_names(stream_of_clouds.train(1)[0].read(np.array([0]))) == {"pos"}


MASKED = np.ma.masked_equal(np.arange(20.0).reshape(20, 1), 7.0)


@pytest.mark.parametrize(
    "make_samples",
    [
        lambda: {"a": {"x": MASKED}},
        lambda: {"x": MASKED},
        lambda: (MASKED, Y),
        lambda: [{"x": row} for row in MASKED],
        lambda: [(row, 1) for row in MASKED],
    ],
)
def test_masked_values_are_refused_by_name(make_samples: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"x has 1 masked value, which would count as data; fill"):
        as_source(make_samples())


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c8"])
def test_arrays_of_another_byte_order_are_converted(dtype: str) -> None:
    values = np.arange(20).astype(dtype)
    for samples in ({"x": values}, [{"x": value} for value in values], (values, Y)):
        column = as_source(samples).read(np.arange(20))["x"]
        assert isinstance(column, np.ndarray)
        assert column.dtype.isnative
        np.testing.assert_array_equal(column, values)
        torch.from_numpy(column)


def test_an_array_without_masked_values_is_an_array() -> None:
    column = as_source({"x": np.ma.masked_equal(np.arange(4), 9)}).read(np.arange(4))["x"]
    assert type(column) is np.ndarray
    with pytest.raises(ValueError, match="x is float128, which torch does not have"):
        as_source({"x": np.zeros(3, dtype=np.longdouble)})


def test_a_data_set_of_graphs_is_not_batched_to_look_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class InMemory(InMemoryDataset):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(None)
            graph = Graph(x=torch.ones(3, 2), edge_index=torch.zeros(2, 4, dtype=torch.long))
            self.data, self.slices = self.collate([graph, graph.clone()])

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("all graphs were batched")

    monkeypatch.setattr(Batch, "from_data_list", refuse)
    assert len(as_source(InMemory())) == 2
