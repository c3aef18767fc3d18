"""Statistics of a chain: density, overlap and size, per layer and over time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from instar.extensions.delta.chain import append
from instar.extensions.delta.format.statistics import layer_name, statistics

SIZE = 1000


def save(folder: Path, *changes: dict[str, range]) -> None:
    """A state of two layers, and one more state for each dictionary of changed places."""
    state = {"embed.weight": torch.zeros(0, 2), "layers.0.w": torch.ones(SIZE).bfloat16()}
    state["layers.1.w"] = state["layers.0.w"].clone()
    append(folder, 0, state, None)
    for step, places in enumerate(changes, 1):
        new = {name: tensor.clone() for name, tensor in state.items()}
        for name, indices in places.items():
            new[name].view(torch.int16)[list(indices)] += 1
        append(folder, step, new, state, anchor=not places)
        state = new


def test_density_and_overlap_of_each_layer(tmp_path: Path) -> None:
    save(
        tmp_path,
        {"layers.0.w": range(100)},
        {"layers.0.w": range(50, 150), "layers.1.w": range(30)},
        {"layers.1.w": range(SIZE)},
    )
    first, second, third = statistics(tmp_path)
    assert first.whole.density == 100 / (2 * SIZE)
    assert first.whole.overlap is None
    assert second.whole.overlap == 50 / 180
    assert second.layers["layers.0"].overlap == 50 / 150
    assert second.layers["layers.0"].density == 0.1
    assert second.layers["embed"].density == 0
    assert third.layers["layers.1"].overlap == 30 / SIZE
    assert third.layers["layers.0"].overlap == 0
    assert third.to_dict()["layers"]["layers.1"]["density"] == 1
    assert third.ratio == pytest.approx(third.full_bytes / third.size_bytes)


def test_overlap_after_an_anchor_is_unknown(tmp_path: Path) -> None:
    change = {"layers.0.w": range(10)}
    save(tmp_path, change, {}, change, change)
    assert [entry.number for entry in statistics(tmp_path)] == [1, 3, 4]
    assert [entry.whole.overlap for entry in statistics(tmp_path)] == [None, None, 1]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.11.mlp.up.weight", "model.layers.11"),
        ("blocks.0.norm", "blocks.0"),
        ("0.weight", "0"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("fc1.weight", "fc1"),
        ("scale", "scale"),
    ],
)
def test_layers_are_named_by_their_number(name: str, layer: str) -> None:
    assert layer_name(name) == layer
