from __future__ import annotations

import itertools
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from samples import same

from instar.config.errors import ConfigError
from instar.data.columns import Columns, Ragged, cut, join_columns
from instar.extensions.graphs.arrays import open_arrays
from instar.extensions.graphs.causal_sets import (
    Relation,
    causal_relation,
    causal_sets,
    links_of_relation,
    ordering_fraction,
    percolate,
    prepare_causal_sets,
    sprinkle,
)
from instar.extensions.graphs.config import CausalSetsConfig

MYRHEIM_MEYER = {2: 1 / 2, 3: 8 / 35, 4: 1 / 10}
SEEDS = st.integers(0, 2**32)


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def sprinkling(points: int, dimension: int, seed: int) -> Relation:
    return causal_relation(sprinkle(points, dimension, generator(seed)))


def percolation(points: int, share: float, seed: int) -> Relation:
    return percolate(points, round(share * points * (points - 1) / 2), generator(seed))


orders = st.one_of(
    st.builds(sprinkling, st.integers(2, 40), st.sampled_from([2, 3, 4]), SEEDS),
    st.builds(percolation, st.integers(2, 40), st.floats(0, 1), SEEDS),
)


def dense(column: object) -> NDArray[np.float64]:
    assert isinstance(column, np.ndarray)
    return column


def as_ragged(column: object) -> Ragged:
    assert isinstance(column, Ragged)
    return column


@pytest.mark.parametrize("dimension", [2, 3, 4])
def test_sprinklings_have_the_ordering_fraction_of_their_dimension(dimension: int) -> None:
    fractions = [ordering_fraction(sprinkling(80, dimension, seed)) for seed in range(300)]
    error = np.std(fractions) / np.sqrt(len(fractions))
    assert error < 0.004
    assert abs(np.mean(fractions) - MYRHEIM_MEYER[dimension]) < 4 * error


def cells(coordinates: NDArray[np.float64]) -> NDArray[np.int64]:
    """How many points are where, by the signs of all coordinates, and |t| and distance cut in 4."""
    t, *space = coordinates.T
    signs = sum((axis > 0).astype(np.int64) << n for n, axis in enumerate(coordinates.T))
    distance = np.sqrt(sum(axis * axis for axis in space))
    at = [np.minimum((4 * value).astype(np.int64), 3) for value in (np.abs(t), distance)]
    return np.bincount((signs * 4 + at[0]) * 4 + at[1], minlength=16 << coordinates.shape[1])


@pytest.mark.parametrize("dimension", [2, 3, 4])
def test_points_lie_as_those_of_a_box_that_are_in_the_diamond(dimension: int) -> None:
    points = sprinkle(100_000, dimension, generator(1))
    assert np.all(np.diff(points[:, 0]) >= 0)
    box = generator(2).uniform(-1, 1, (1_500_000, dimension))
    box_points = box[np.abs(box[:, 0]) + np.linalg.norm(box[:, 1:], axis=1) < 1]
    counts, expected = cells(points), cells(box_points) * (len(points) / len(box_points))
    assert np.array_equal(counts > 0, expected > 0)
    mask = expected > 10
    # both counts are drawn
    spread = expected[mask] * (1 + len(points) / len(box_points))
    chi2 = np.sum((counts[mask] - expected[mask]) ** 2 / spread)
    freedom = np.count_nonzero(mask) - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom)


@settings(deadline=None, max_examples=60)
@given(relation=orders)
def test_orders_are_transitive_and_go_forwards(relation: Relation) -> None:
    composition = relation.astype(np.int64) @ relation.astype(np.int64) > 0
    assert not np.any(composition & ~relation)
    assert not np.any(np.tril(relation))


@settings(deadline=None, max_examples=40)
@given(relation=orders)
def test_links_are_the_transitive_reduction(relation: Relation) -> None:
    graph = nx.from_numpy_array(relation, create_using=nx.DiGraph)
    assert set(zip(*np.nonzero(links_of_relation(relation)), strict=True)) == set(
        nx.transitive_reduction(graph).edges
    )


@settings(deadline=None, max_examples=40)
@given(points=st.integers(2, 10), share=st.floats(0, 1), seed=SEEDS)
def test_percolation_is_the_closure_of_the_bonds_that_come_nearest(
    points: int, share: float, seed: int
) -> None:
    relations = round(share * points * (points - 1) / 2)
    bonds = np.triu(generator(seed).random((points, points), dtype=np.float32), 1)
    closures = []
    for p in [0.0, *np.sort(bonds[bonds > 0])]:
        graph = nx.from_numpy_array((bonds > 0) & (bonds <= p), create_using=nx.DiGraph)
        closures.append(nx.to_numpy_array(nx.transitive_closure(graph), dtype=bool))
    counts = np.array([np.count_nonzero(closure) for closure in closures])
    relation = percolate(points, relations, generator(seed))
    assert any(np.array_equal(relation, closure) for closure in closures)
    assert abs(np.count_nonzero(relation) - relations) == np.min(np.abs(counts - relations))


def test_percolation_has_about_as_many_relations_as_asked_for() -> None:
    fractions = [
        (share, ordering_fraction(percolation(150, share, 3))) for share in (0.1, 0.23, 0.5)
    ]
    assert all(abs(fraction - share) < 0.01 for share, fraction in fractions)


SMALL = CausalSetsConfig(sets=60, min_points=5, max_points=30, features=("links", "volumes"))


@settings(deadline=None, max_examples=20)
@given(
    seed=SEEDS,
    cuts=st.lists(st.integers(1, 11), max_size=3, unique=True),
    relations=st.sampled_from(["links", "causal"]),
)
def test_a_set_follows_from_its_number_however_it_is_made(
    seed: int, cuts: list[int], relations: str
) -> None:
    options = SMALL.model_copy(update={"relations": relations})
    edges = [0, *sorted(cuts), 12]
    parts = [causal_sets(options, seed, a, b) for a, b in itertools.pairwise(edges)]
    assert same(join_columns(parts), causal_sets(options, seed, 0, 12))


def relation_of(sets: Columns, number: int) -> Relation:
    sample = cut(sets, number, number + 1)
    points = len(as_ragged(sample["x"]).flat)
    relation = np.zeros((points, points), dtype=bool)
    relation[tuple(as_ragged(sample["edges"]).flat.T)] = True
    return relation


def test_columns_say_what_the_order_says() -> None:
    causal = SMALL.model_copy(update={"relations": "causal"})
    full_sets, link_sets = causal_sets(causal, 1, 0, 60), causal_sets(SMALL, 1, 0, 60)
    assert {name: str(getattr(c, "values", c).dtype) for name, c in full_sets.items()} == {
        "x": "float32",
        "edges": "int64",
        "manifold": "int64",
        "dimension": "int64",
        "ordering_fraction": "float32",
    }
    for number in range(60):
        relation, reduction = relation_of(full_sets, number), relation_of(link_sets, number)
        assert np.array_equal(links_of_relation(relation), reduction)
        fraction = dense(full_sets["ordering_fraction"])[number]
        assert fraction == np.float32(ordering_fraction(relation))
        x = as_ragged(cut(full_sets, number, number + 1)["x"]).flat
        expected = [
            *np.log1p([reduction.sum(0), reduction.sum(1)]),
            relation.mean(0),
            relation.mean(1),
        ]
        assert x == pytest.approx(np.stack(expected, axis=1))
    manifold, dimension = dense(full_sets["manifold"]), dense(full_sets["dimension"])
    assert np.array_equal(manifold == 0, dimension == -1)
    assert set(dimension) == {-1, 0, 1, 2}
    only = CausalSetsConfig(sets=60, min_points=5, max_points=9, dimensions=(4,))
    assert set(dense(causal_sets(only, 1, 0, 60)["dimension"])) == {-1, 2}
    assert not same(causal_sets(SMALL, 2, 0, 60), link_sets)


def by_value(
    train: NDArray[np.float64], labels: NDArray[np.float64], test: NDArray[np.float64], bins: int
) -> NDArray[np.bool_]:
    """What most of the training values in the same of so many quantiles are."""
    edges = np.quantile(train, np.linspace(0, 1, bins + 1)[1:-1])
    at = np.searchsorted(edges, train)
    share = np.bincount(at, labels, bins) / np.bincount(at, minlength=bins)
    return share[np.searchsorted(edges, test)] > 0.5


@pytest.mark.torture
def test_the_ordering_fraction_alone_tells_no_more_than_chance() -> None:
    options = CausalSetsConfig(sets=3000, min_points=64, max_points=96)
    sets = causal_sets(options, 0, 0, options.sets)
    fraction, manifold = dense(sets["ordering_fraction"]), dense(sets["manifold"])
    half = options.sets // 2
    accuracies = {
        bins: np.mean(
            by_value(fraction[:half], manifold[:half], fraction[half:], bins) == manifold[half:]
        )
        for bins in (2, 8, 32)
    }
    print("accuracy on the ordering fraction alone:", accuracies)
    assert max(accuracies.values()) < 0.56
    # yet it tells the dimension of a sprinkling
    is_sprinkled = manifold == 1
    nearest = np.abs(fraction[:, None] - list(MYRHEIM_MEYER.values())).argmin(axis=1)
    assert np.mean(nearest[is_sprinkled] == dense(sets["dimension"])[is_sprinkled]) > 0.9


def test_prepared_sets_are_those_generated_and_made_once(tmp_path: Path) -> None:
    messages: list[str] = []
    folder = prepare_causal_sets(SMALL, tmp_path / "sets", seed=7, say=messages.append)
    assert messages == [f"generating 60 causal sets → {folder}"]
    assert same(open_arrays(folder).read(np.arange(60)), causal_sets(SMALL, 7, 0, 60))
    mtimes = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    assert prepare_causal_sets(SMALL, folder, seed=8, say=messages.append) == folder
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == mtimes
    assert open_arrays(folder).about["seed"] == 7
    assert len(messages) == 1


def test_a_folder_with_other_sets_is_refused(tmp_path: Path) -> None:
    folder = prepare_causal_sets(SMALL, tmp_path / "sets", seed=7)
    other = SMALL.model_copy(update={"relations": "causal", "sets": 61})
    with pytest.raises(ConfigError, match="sets=60, not 61, relations='links', not 'causal'"):
        prepare_causal_sets(other, folder, seed=7)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        prepare_causal_sets(SMALL, tmp_path / "full", seed=7)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"min_points": 31}, "min_points is 31, more than data.causal_sets.max_points, 30"),
        ({"dimensions": (2, 2)}, "data.causal_sets.dimensions has a duplicate value"),
        ({"features": ("links", "links")}, "data.causal_sets.features has a duplicate value"),
    ],
)
def test_options_that_contradict_themselves_are_named(
    tmp_path: Path, change: dict[str, object], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        prepare_causal_sets(SMALL.model_copy(update=change), tmp_path / "sets", seed=1)
    assert not list(tmp_path.iterdir())
