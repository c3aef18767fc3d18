"""Processes of every loop: killed after growth and resumed, with the bits of a run that is not; and several of one run."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path

import torch
from cases import parametrize_first
from forks import Child, Forks, children_as_ranks
from grown_loops import LAST, LOOPS
from safetensors.torch import load_file
from torch import Tensor


def is_grown(tensors: Mapping[str, Tensor]) -> bool:
    last = [name for name in tensors if name.endswith("layers.3.mlp.up_proj.weight")]
    return [tuple(tensors[name].shape) for name in last] == [(96, 48)]


@parametrize_first("loop", LOOPS, first=1)
def test_a_killed_run_goes_on_across_growth(loop: str, tmp_path: Path, forks: Forks) -> None:
    forks.import_now("grown_loops", "peft")

    def child(name: str, *words: int) -> Child:
        (tmp_path / name).mkdir(exist_ok=True)
        return forks.start("grown_loops:run", loop, *words, place=tmp_path / name)

    def last(name: str, *words: int) -> dict[str, Tensor]:
        run = child(name, *words)
        assert run.finish() == 0, run.output()
        return load_file(tmp_path / name / LAST)

    expected = last("whole")
    assert is_grown(expected)
    victim = child("killed", 0, 4)
    assert victim.wait_for("^saved 4$"), victim.output()
    victim.signal(signal.SIGKILL)
    assert victim.finish() == -signal.SIGKILL
    assert not (tmp_path / "killed" / LAST).exists()
    for step in (4, 3):  # right after the second operation, and between the two
        actual = last("killed", step)
        assert actual.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []
    if loop == "trainer":
        config = json.loads((tmp_path / "whole/checkpoint-3/config.json").read_text())
        assert (config["intermediate_size"], config["num_hidden_layers"]) == (96, 3)


@parametrize_first("loop", LOOPS, first=2)
def test_two_processes_grow_alike_and_train_on(loop: str, tmp_path: Path, forks: Forks) -> None:
    """Gradients of all parameters, new ones too, are those of both processes, which have samples of their own."""
    forks.import_now("grown_loops", "peft")
    for rank in children_as_ranks(forks, 2, "grown_loops:run", loop, place=tmp_path):
        assert rank.finish() == 0, rank.output()
    first, other = (load_file(tmp_path / f"last-{rank}.safetensors") for rank in range(2))
    assert is_grown(first)
    assert [name for name in first if not torch.equal(first[name], other[name])] == []
