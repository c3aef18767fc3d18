"""Every branch for GPUs, on the pretended device of `tests/support/pretended.py`; `make test` runs these."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pretended
import pytest
import torch
from forks import Forks, children_as_ranks
from tiny_run import codes, said

from instar.api.training import train
from instar.checkpoint.store import load as load_checkpoint
from instar.distributed.rank_log import RankLog
from instar.distributed.signals import StopSignal
from instar.record import system
from instar.record.events import Train, read_events
from instar.record.rundir import find_run
from instar.run.lifecycle.load import load_config
from instar.run.lifecycle.resume import Resume
from instar.run.lifecycle.worker import run

TEXT = "".join(f"{n} squared is {n * n}, and {n} cubed is {n**3}.\n" for n in range(300))
TINY = """\
name: tiny
precision: fp32
preset: llama
model: {n_layer: 1, n_head: 2, n_kv_head: 1, n_embd: 16, context: 16, qk_norm: true, conv_size: 3}
data: {source: squares.txt, path: tokens, tokenizer: char}
train: {until: 4it, batch_size: 4, gradient_accumulation_steps: 2}
learning_rate: {warmup_iters: 2}
optimizer: {lr: 3e-3}
eval: {eval_interval: 2, eval_iters: 2}
checkpoint: {every_steps: 2}
record: {log_interval: 1, sample_tokens: 3, report: false}
"""
GROWS = [
    {"name": "insert_layers", "value": 1, "when": {"at_step": 1}},
    {"name": "widen_hidden", "value": 24, "when": {"at_step": 2}, "mask": 2},
    {"name": "set_lora_rank", "value": {"target": "mlp", "rank": 4}, "when": {"at_step": 3}},
]

Losses = Callable[..., list[float]]


@pytest.fixture
def gpu() -> Iterator[pretended.Gpu]:
    with pretended.device() as found:
        yield found


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Losses:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "squares.txt").write_text(TEXT)
    (tmp_path / "tiny.yaml").write_text(TINY)

    def trained(name: str, *overrides: str) -> list[float]:
        train("tiny.yaml", [*overrides, f"record.run_dir={name}"])
        return recorded(tmp_path / name)

    return trained


def recorded(run_dir: Path) -> list[float]:
    events = read_events(run_dir / "events.jsonl")
    return [event.loss for event in events if isinstance(event, Train)]


def resume(run_dir: Path, *overrides: str) -> list[float]:
    found = Resume(find_run(str(run_dir)), fresh=True)
    with StopSignal() as signal, RankLog(0) as log:
        run(load_config(str(found.run.config), overrides), log, signal, found)
    return recorded(run_dir)


@pytest.mark.parametrize(
    "how",
    [
        [],
        ["precision=bf16", "train.ema=0.9"],
        ["optimizer.name=muon", "train.gradient_checkpointing=true"],
        ["reproducible=elastic", "parallel.elastic.virtual_ranks=2"],
        [f"schedule={json.dumps(GROWS)}", "record.analyze_every=2"],
        ["precision=bf16", "model.num_experts=3"],
        ["model.bias=true", "model.num_experts=3"],
    ],
    ids=[
        "plain",
        "bf16 with average",
        "muon with checkpointing",
        "elastic",
        "grows",
        "experts in one kernel",
        "experts one by one",
    ],
)
def test_runs_take_the_branches_for_gpus_and_compute_the_same(
    losses: Losses, how: list[str]
) -> None:
    on_cpu = losses("cpu", "device=cpu", *how)
    with pretended.device():
        assert losses("gpu", "device=cuda", *how) == pytest.approx(on_cpu, rel=1e-4)
    assert len(on_cpu) == 4


@pytest.mark.usefixtures("gpu")
def test_fp16_scales_its_gradients(losses: Losses) -> None:
    full = losses("fp32")
    half = losses("fp16", "precision=fp16", "train.max_skipped_steps=4")
    assert half == pytest.approx(full, rel=1e-2)


@pytest.mark.usefixtures("gpu")
def test_a_run_goes_on_where_it_was_saved(losses: Losses, tmp_path: Path) -> None:
    drops = "model.dropout=0.2"
    whole = losses("whole", drops)
    losses("parts", drops, "train.until=2it")
    assert resume(tmp_path / "parts", "train.until=4it") == whole
    saved = load_checkpoint(tmp_path / "parts" / "checkpoints" / "step-4").tensors("model")
    assert all(type(tensor) is torch.Tensor for tensor in saved.values())


def test_samples_are_pinned_by_the_thread_that_reads_ahead(
    losses: Losses, gpu: pretended.Gpu
) -> None:
    losses("run", "checkpoint.asynchronous=false")
    assert set(gpu.pinned_by) == {"instar-prefetch"}
    assert any(each.to == "cuda" and each.pinned and not each.waits for each in gpu.transfers)


def test_only_the_generators_in_use_are_seeded(losses: Losses, gpu: pretended.Gpu) -> None:
    losses("run", "model.dropout=0.2", "reproducible=elastic", "parallel.elastic.virtual_ranks=2")
    assert gpu.calls["manual_seed_all"] == 0


@pytest.mark.parametrize(
    ("how", "mode"),
    [([], "high"), (["tf32=false"], "highest"), (["reproducible=elastic"], "highest")],
)
def test_float32_matrices_are_multiplied_as_the_config_says(
    losses: Losses, how: list[str], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    measure = system.measure_peak_flops

    def measured(*args: Any) -> float:
        modes.append(torch.get_float32_matmul_precision())
        return measure(*args)

    monkeypatch.setattr(system, "measure_peak_flops", measured)
    with pretended.device():
        losses("run", "train.until=1it", *how)
    assert set(modes) == {mode}
    assert torch.get_float32_matmul_precision() == "highest"


def test_background_saves_copy_to_pinned_memory_without_waiting(
    losses: Losses, gpu: pretended.Gpu, tmp_path: Path
) -> None:
    losses("run", "checkpoint.every_steps=1", "train.ema=0.9")
    assert gpu.calls["Event.synchronize"] > 0
    assert any(each.to == "cpu" and not each.waits for each in gpu.transfers)
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        assert load_checkpoint(path).tensors("model")


@pytest.mark.parametrize("strategy", ["sharded", "dispatched"])
def test_two_ranks_train_under_ddp_with_nccl_as_one_does(
    losses: Losses, tmp_path: Path, forks: Forks, strategy: str
) -> None:
    """What NCCL would send goes over gloo."""
    one = losses("one", "device=cpu")
    sets = ["record.run_dir=two", "device=cuda", f"data.strategy={strategy}"]
    argv = ["train", "tiny.yaml", *(word for text in sets for word in ("--set", text))]
    ranks = children_as_ranks(forks, 2, "pretended:one_gpu_each", argv, place=tmp_path)
    assert codes(ranks) == [0, 0], said(ranks)
    assert recorded(tmp_path / "two") == pytest.approx(one, rel=1e-5)
    assert "cpu:gloo,cuda:nccl" in said(ranks)
