"""What docs/graph-networks.md says is refused is refused, in these words."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.config.errors import ConfigError
from instar.data.columns import Columns, Ragged
from instar.extensions.graphs import spec as graph_spec
from instar.schedule.checks import load_checked

PAGE = Path(__file__).parents[2] / "docs/graph-networks.md"
RING = "{name: ring, kind: classification, classes: 2}"


@dataclass(frozen=True)
class Wrong:
    """What is done to sound graphs, or to a config, and the row of the page that speaks of it."""

    row: str
    options: list[str] = field(default_factory=list)
    spoil: Callable[[dict[str, Any]], None] = lambda _: None


def rings() -> dict[str, Any]:
    """300 rings and chains of 5 to 12 nodes; sample 4 is a ring."""
    rng = np.random.default_rng(0)
    sizes, ring = rng.integers(5, 13, 300), np.arange(300) % 2
    edges = [[(i, (i + 1) % n) for i in range(n - 1)] for n in sizes]
    return {
        "x": ragged_array([np.ones((n, 1), dtype=np.float32) for n in sizes]),
        "edges": ragged_array([np.array(pairs) for pairs in edges]),
        "ring": ring,
        "length": sizes.astype(np.float32),
    }


def ragged_array(arrays: list[Any]) -> Ragged:
    return Ragged(np.concatenate(arrays), np.cumsum([0, *map(len, arrays)]))


def put(column: str, place: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """Puts a value into a column, of a ragged one into its flat array."""

    def spoil(samples: dict[str, Any]) -> None:
        array = samples[column].flat if isinstance(samples[column], Ragged) else samples[column]
        array[place] = value

    return spoil


def put_in_sample(column: str, sample: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def spoil(samples: dict[str, Any]) -> None:
        samples[column].flat[samples[column].offsets[sample]] = value

    return spoil


def empty(samples: dict[str, Any], sample: int = 5) -> None:
    for column in ("x", "edges"):
        arrays = [samples[column].flat[b:e] for b, e in bounds(samples[column])]
        arrays[sample] = arrays[sample][:0]
        samples[column] = ragged_array(arrays)


def bounds(column: Ragged) -> list[tuple[int, int]]:
    return list(zip(column.offsets[:-1], column.offsets[1:], strict=True))


def grow(samples: dict[str, Any]) -> None:
    """Every graph has 10 nodes at most, but for sample 0."""
    arrays = [samples["x"].flat[b:e][:10] for b, e in bounds(samples["x"])]
    arrays[0] = np.ones((11, 1), dtype=np.float32)
    samples["x"] = ragged_array(arrays)
    samples["edges"] = ragged_array([np.zeros((1, 2), dtype=np.int64)] * len(arrays))


LENGTH = "model.heads=[{name: length, kind: regression}]"
WRONG = [
    Wrong(
        "a head without a target",
        ["model.heads=[{name: colour, kind: classification, classes: 2}]"],
    ),
    Wrong(
        "a classification without `classes`", ["model.heads=[{name: ring, kind: classification}]"]
    ),
    Wrong("a class that is too large", spoil=put("ring", 4, 2)),
    Wrong(
        "a class that no training sample has",
        ["model.heads=[{name: ring, kind: classification, classes: 3}]"],
    ),
    Wrong("NaN in a target", [LENGTH], put("length", 3, np.nan)),
    Wrong("NaN in a feature", spoil=put_in_sample("x", 3, np.nan)),
    Wrong("an empty graph", spoil=empty),
    Wrong("a graph larger than `model.max_nodes`", ["model.max_nodes=10"], grow),
    Wrong("an edge to nowhere", spoil=put_in_sample("edges", 0, (0, 99))),
    Wrong(
        "heads of graphs and of nodes",
        [f"model.heads=[{RING}, {{name: depth, kind: regression, level: node}}]"],
    ),
    Wrong("two heads of one name", [f"model.heads=[{RING}, {{name: ring, kind: regression}}]"]),
    Wrong("unknown metric", ["early_stopping.rules=[{metric: ring/acuracy}]"]),
    Wrong("patience 0", ["early_stopping.rules=[{metric: loss, patience: 0}]"]),
    Wrong("shares over 1", ["data.val=0.6", "data.test=0.5"]),
    Wrong("nothing left to train on", ["data.val=200", "data.test=100"]),
    Wrong("no validation split", ["data.val=0"]),
]


def expected_messages() -> dict[str, str]:
    """The table of the page: what is wrong, and what is said."""
    table = PAGE.read_text("utf-8").partition("## What is refused")[2]
    return dict(re.findall(r"^\| (.+?) \| `(.+)` \|$", table, re.MULTILINE))


def complaint(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> str:
    def load_samples(*_: Any, **__: Any) -> Callable[[], Columns]:
        samples = rings()
        wrong.spoil(samples)
        return lambda: samples

    monkeypatch.setattr(graph_spec, "load_named", load_samples)
    sound = ["task=graph", "data.source=rings:samples", f"model.heads=[{RING}]"]
    try:
        loaded_config = load_checked(None, [*sound, *wrong.options])
        graph_spec.GraphSpec.open(loaded_config, 1).data.held_out("val")
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.row)
def test_what_is_wrong_is_refused_in_the_words_of_the_page(
    wrong: Wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expected_messages()[wrong.row] in complaint(wrong, monkeypatch)


def test_every_row_of_the_page_is_tried() -> None:
    assert expected_messages().keys() == {wrong.row for wrong in WRONG}


def test_what_is_sound_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert complaint(Wrong(""), monkeypatch) == ""
