"""Causal sets: sprinklings of Minkowski space, and percolation orders with as many relations.

A sprinkling is n points drawn uniformly from a causal diamond, with the order that light cones induce
on them (Bombelli, Lee, Meyer and Sorkin, "Space-time as a causal set", 1987). A percolation order
(Rideout and Sorkin, "Classical sequential growth dynamics for causal sets", 2000) has no spacetime
behind it. Each is given as many relations as a sprinkling of its size has, so that their number,
which tells the dimension of a sprinkling (Myrheim 1978, Meyer 1988), does not tell which is which.

The features of a sample are functions of the order alone: no coordinates, no times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instar.config.errors import ConfigError, ConfigProblem
from instar.data.columns import Ragged
from instar.data.order import key_bytes
from instar.extensions.graphs.arrays import holds_arrays, open_arrays, write_arrays
from instar.extensions.graphs.config import (
    CAUSAL_SETS_SECTION,
    CausalSetsConfig,
    causal_set_conflicts,
)
from instar.record.progress import progress

Float64Array = NDArray[np.float64]
Relation = NDArray[np.bool_]
"""[n, n]: whether the first point is in the past of the second. Points are sorted by time, so only
entries above the diagonal can be true."""

NO_DIMENSION = -1
LOWEST_DIMENSION = 2

_KIND = "causal-sets/1"
_BLOCK_SETS = 256
_PREVIEW_SETS = 100


def prepare_causal_sets(
    options: CausalSetsConfig,
    folder: str | Path,
    seed: int,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Generate causal sets into an array store, unless it exists already.

    Its samples are those of `causal_sets`; set i is a function of (seed, i) and the options alone.

    Raises:
        ConfigError: the options contradict each other, or the folder holds other data or sets made
            with other options. The seed is not compared: a store may serve runs with other seeds.
    """
    problems = [
        ConfigProblem((), message, place=keys[0]) for keys, message in causal_set_conflicts(options)
    ]
    if problems:
        raise ConfigError(*problems)
    path = Path(folder)
    if not holds_arrays(path):
        say(f"generating {options.sets:,} causal sets → {path}")
        about = {"kind": _KIND, "seed": seed, **options.model_dump(mode="json")}
        write_arrays(path, _blocks(options, seed), about)
    _check_options(options, path)
    return path


def preview_causal_sets(options: CausalSetsConfig, seed: int) -> dict[str, NDArray[Any] | Ragged]:
    """Generate the first sets in memory, for a forecast before any are stored."""
    return causal_sets(options, seed, 0, min(_PREVIEW_SETS, options.sets))


def causal_sets(
    options: CausalSetsConfig, seed: int, begin: int, end: int
) -> dict[str, NDArray[Any] | Ragged]:
    """Generate sets begin … end-1 as columns.

    x                  float32 [points, features], ragged: see `node_features`
    edges              int64 [edges, 2], ragged: points of a related pair, the earlier one first
    manifold           int64: 1 sprinkled, 0 percolation
    dimension          int64: 0, 1, 2 of a sprinkling in 2, 3, 4 dimensions, -1 of a percolation
    ordering_fraction  float32: related pairs / all pairs
    """
    sets = [_draw(options, seed, index) for index in range(begin, end)]
    relations = [relation for relation, _, _ in sets]
    links = [links_of_relation(relation) for relation in relations]
    edges = links if options.relations == "links" else relations
    return {
        "x": _ragged_column(
            [
                node_features(relation, link, options.features)
                for relation, link in zip(relations, links, strict=True)
            ]
        ),
        "edges": _ragged_column([np.argwhere(relation) for relation in edges]),
        "manifold": np.array([manifold for _, manifold, _ in sets], dtype=np.int64),
        "dimension": np.array(
            [d - LOWEST_DIMENSION if manifold else NO_DIMENSION for _, manifold, d in sets],
            dtype=np.int64,
        ),
        "ordering_fraction": np.array(list(map(ordering_fraction, relations)), dtype=np.float32),
    }


def sprinkle(points: int, dimension: int, generator: np.random.Generator) -> Float64Array:
    """Draw points uniformly in the causal diamond between times -1 and 1, sorted by time.

    At time t the diamond is a ball of radius r = 1 - |t| in the other dimension - 1 coordinates, so r
    has the density dimension · r^(dimension - 1). Each row is (t, x, y, …).
    """
    radius = generator.random(points) ** (1 / dimension)
    t = np.where(generator.random(points) < 0.5, radius - 1, 1 - radius)
    direction = generator.standard_normal((points, dimension - 1))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    distance = radius * generator.random(points) ** (1 / (dimension - 1))
    coordinates = np.column_stack([t, direction * distance[:, None]])
    return coordinates[np.argsort(t)]


def causal_relation(coordinates: Float64Array) -> Relation:
    """Return the causal relation of points [n, dimension] that are sorted by time."""
    times, *distances = (axis[None, :] - axis[:, None] for axis in coordinates.T)
    interval = times * times
    for distance in distances:
        interval -= distance * distance
    relation: Relation = (interval > 0) & (times > 0)
    return relation


def percolate(points: int, relations: int, generator: np.random.Generator) -> Relation:
    """Draw a transitive percolation order with as nearly as possible `relations` relations.

    A number is drawn for each pair of points. Transitive percolation at p is the transitive closure of
    the bonds whose numbers are below p. Each pair has a threshold of p above which a chain of bonds
    relates it; the best p is found exactly from the sorted thresholds.
    """
    bonds = generator.random((points, points), dtype=np.float32)
    below = min(1.0, 16 / points)
    thresholds = _thresholds(bonds, below)
    while np.count_nonzero(thresholds < below) <= relations and below < 1:
        below = min(1.0, 2 * below)
        thresholds = _thresholds(bonds, below)
    flat = np.sort(thresholds, axis=None)
    p = flat[relations]
    fewer, more = np.searchsorted(flat, p, "left"), np.searchsorted(flat, p, "right")
    nearest: Relation = thresholds < p if relations - fewer <= more - relations else thresholds <= p
    return nearest


def links_of_relation(relation: Relation) -> Relation:
    """Return the transitive reduction: the relations with no point in between."""
    paths = relation.astype(np.float32)
    links: Relation = relation & (paths @ paths == 0)
    return links


def ordering_fraction(relation: Relation) -> float:
    """Return related pairs / all pairs; for large sprinklings 1/2, 8/35, 1/10 in 2, 3, 4 dimensions."""
    points = len(relation)
    return float(np.count_nonzero(relation) / (points * (points - 1) / 2))


def node_features(
    relation: Relation, links: Relation, features: Sequence[str]
) -> NDArray[np.float32]:
    """Compute node features [n, 2 × features], past before future.

    links: log(1 + number of links); volumes: the fraction of the set that the point is related to.
    The mean volume is half the ordering fraction, up to a factor 1 - 1/n.
    """
    columns = {
        "links": lambda: [np.log1p(links.sum(axis)) for axis in (0, 1)],
        "volumes": lambda: [relation.mean(axis) for axis in (0, 1)],
    }
    return np.stack([c for name in features for c in columns[name]()], axis=1).astype(np.float32)


def _draw(options: CausalSetsConfig, seed: int, index: int) -> tuple[Relation, bool, int]:
    """Draw set number `index`: its relation, whether it is a sprinkling, and its dimension."""
    key = int.from_bytes(key_bytes("causal sets", seed, index, 16), "little")
    generator = np.random.Generator(np.random.Philox(key=key))
    manifold = bool(generator.integers(2))
    dimension = options.dimensions[generator.integers(len(options.dimensions))]
    points = int(generator.integers(options.min_points, options.max_points + 1))
    relation = causal_relation(sprinkle(points, dimension, generator))
    if not manifold:
        relation = percolate(points, int(np.count_nonzero(relation)), generator)
    return relation, manifold, dimension


def _thresholds(bonds: NDArray[np.float32], below: float) -> NDArray[np.float32]:
    """Return, for each pair, the minimum over chains between its points of the chain's largest bond.

    Exact where less than `below`, otherwise between `below` and 2; 2 on and below the diagonal, and
    where no chain of such bonds exists.
    """
    points = len(bonds)
    thresholds = np.full_like(bonds, 2)
    np.fill_diagonal(thresholds, 0)
    for first in range(points - 2, -1, -1):
        later = slice(first + 1, points)
        via = first + 1 + np.flatnonzero(bonds[first, later] < below)
        if via.size:
            thresholds[first, later] = np.maximum(
                bonds[first, via, None], thresholds[via, later]
            ).min(axis=0)
    np.fill_diagonal(thresholds, 2)
    return thresholds


def _ragged_column(arrays: Sequence[NDArray[Any]]) -> Ragged:
    sizes = np.array([0, *map(len, arrays)], dtype=np.int64)
    return Ragged(np.concatenate(arrays), np.cumsum(sizes))


def _blocks(options: CausalSetsConfig, seed: int) -> Iterator[dict[str, NDArray[Any] | Ragged]]:
    with progress("generating", options.sets, "causal sets") as advance:
        for begin in range(0, options.sets, _BLOCK_SETS):
            end = min(begin + _BLOCK_SETS, options.sets)
            yield causal_sets(options, seed, begin, end)
            advance(end - begin)


def _check_options(options: CausalSetsConfig, folder: Path) -> None:
    about = open_arrays(folder, in_memory_bytes=0).about
    expected = {"kind": _KIND, **options.model_dump(mode="json")}
    differing = [key for key in expected if about.get(key) != expected[key]]
    if differing:
        differences = ", ".join(
            f"{key}={about.get(key)!r}, not {expected[key]!r}" for key in differing
        )
        raise ConfigError.at(
            "data.path",
            f"the samples in {folder} were generated with other options: {differences}",
            f"set these keys under {CAUSAL_SETS_SECTION} to the same values, or choose another data.path",
        )
