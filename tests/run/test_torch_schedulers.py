"""A run with a scheduler of torch has torch's rates, also resumed, with an operation, and in a branch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from science import forks
from tiny_run import TEXT, Place, codes, events, output_of, weights

RUN = """\
name: by-torch
model: {n_layer: 1, n_head: 2, n_embd: 32, context: 16}
data: {source: squares.txt, path: tokens, tokenizer: char}
train: {until: 12it, batch_size: 8, gradient_accumulation_steps: 1}
optimizer: {lr: 0.004}
learning_rate: {shape: CosineAnnealingWarmRestarts, options: {T_0: 3, T_mult: 2, eta_min: 0.001}}
eval: {eval_interval: 6}
checkpoint: {on_best: false}
record: {log_interval: 1, sample_tokens: 0, report: false}
"""
SCHEDULE = [
    {"name": "branch", "value": "side", "iters": 4, "decay": 2, "when": {"at_step": 5}},
    {"name": "change_lr", "value": 0.5, "when": {"at_step": 8}},
]


def rates(run_dir: Path) -> list[float]:
    return [event["lr"] for event in events(run_dir, "train")]


def test_a_run_resumed_changed_and_branched_has_the_rates_of_torch(tmp_path: Path) -> None:
    (tmp_path / "squares.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    place = Place(tmp_path, forks())
    keys = (f"schedule={json.dumps(SCHEDULE)}",)
    full_run, parts = tmp_path / "whole", tmp_path / "parts"
    children = place.train(full_run, *keys)
    assert codes(children) == [0], output_of(children)
    children = place.train(parts, *keys, "train.until=[7it]")
    assert codes(children) == [0], output_of(children)
    children = place.resume(parts, "--until", "12it")
    assert codes(children) == [0], output_of(children)

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.004)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2, 0.001)
    expected = []
    for step in range(12):
        expected.append(scheduler.get_last_lr()[0] * (1 if step < 8 else 0.5))
        optimizer.step()
        scheduler.step()
    assert rates(full_run) == pytest.approx(expected, rel=1e-6)
    assert rates(parts) == rates(full_run)
    assert weights(parts, 12) == weights(full_run, 12)
    # the branch goes on at the trunk's rate, and falls in its last two steps from that of the first of them
    side = rates(tmp_path / "whole.side")
    assert side[:2] == pytest.approx(expected[5:7], rel=1e-6)
    assert side[2:] == pytest.approx([expected[7], expected[7] / 2], rel=1e-6)
