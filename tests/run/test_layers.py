"""What a step did to each layer, and that looking changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from instar.record.events import Layers, Train, read_events
from instar.run.parallel.replicated import whole_norms
from instar.run.state.gradient_stats import LayerStats, group_of
from instar.run.trainer import Trainer

Make = Callable[..., Trainer]


def test_groups_are_blocks_and_what_stands_beside_them() -> None:
    names = ("blocks.11.mlp.up.weight", "embed.weight", "norm.scale", "heads.kind.weight")
    assert [group_of(name) for name in names] == ["blocks.11", "embed", "norm", "heads"]


def test_norms_are_of_the_whole_group() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    parameters = {f"blocks.{name}": p for name, p in model.named_parameters()}
    model(torch.ones(5, 3)).square().sum().backward()
    watch = LayerStats(whole_norms)
    watch.before(parameters)
    gradients = torch.cat([p.grad.flatten() for p in model[1].parameters() if p.grad is not None])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.75)
    watch.after(parameters)
    assert watch.grad_norm["blocks.1"] == pytest.approx(gradients.norm().item())
    assert watch.update_ratio == pytest.approx({"blocks.0": 0.25, "blocks.1": 0.25})


def test_layers_are_recorded_when_they_are_due_and_training_is_the_same(
    trainer: Make, losses: Callable[[str], list[float]], tmp_path: Path
) -> None:
    run = trainer("record.layers_every=3", name="watched")
    run.train()
    trainer(name="plain").train()
    assert losses("watched") == losses("plain")
    events = list(read_events(tmp_path / "watched.jsonl"))
    layer_events = [event for event in events if isinstance(event, Layers)]
    assert [event.step for event in layer_events] == [3, 6]
    norms = {event.step: event.grad_norm for event in events if isinstance(event, Train)}
    for event in layer_events:
        assert {"blocks.0", "blocks.1"} < set(event.grad_norm) == set(event.update_ratio)
        total_norm = sum(norm**2 for norm in event.grad_norm.values()) ** 0.5
        assert total_norm == pytest.approx(norms[event.step], rel=1e-5)
        assert all(0 < ratio < 1 for ratio in event.update_ratio.values())
