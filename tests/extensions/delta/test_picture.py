"""The picture of a chain of deltas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from instar.config.errors import ConfigError
from instar.extensions.delta.chain import append
from instar.extensions.delta.format.statistics import statistics
from instar.extensions.delta.picture import deltas_picture


def test_a_chain_is_drawn_with_its_steps_and_layers_and_always_alike(tmp_path: Path) -> None:
    generator, base = torch.Generator().manual_seed(0), None
    for step in (0, 10, 20, 30, 20, 30):  # resumed from step 20
        tensors = {f"blocks.{n}.weight": torch.rand(64, generator=generator) for n in range(3)}
        if base is not None:
            for name, tensor in tensors.items():
                tensor[step:] = base[name][step:]
        append(tmp_path / "deltas", step, tensors, base)
        base = tensors
    link_statistics = statistics(tmp_path / "deltas")
    picture = deltas_picture(link_statistics, "deltas", "svg")
    assert picture == deltas_picture(link_statistics, "deltas", "svg")
    text = picture.decode()
    for label in ("deltas", "blocks.0", "blocks.2", "share of weights changed", "overlap"):
        assert f"<!-- {label}" in text
    assert [f"<!-- {step} -->" in text for step in (10, 20, 30)] == [True] * 3


def test_a_chain_without_links_is_refused(tmp_path: Path) -> None:
    append(tmp_path / "deltas", 0, {"weight": torch.zeros(3)}, None)
    with pytest.raises(ConfigError, match="no links yet"):
        deltas_picture(statistics(tmp_path / "deltas"), "deltas", "png")
