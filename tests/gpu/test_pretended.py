"""Every branch for GPUs, on the pretended device of `tests/support/fake_gpu.py`; `make test` runs these."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
import states
import torch
from cases import parametrize_first
from forks import Forks, children_as_ranks
from tiny_run import codes, output_of
from torch import Tensor
from torch.overrides import TorchFunctionMode

from instar.api.training import train
from instar.checkpoint.store import load_checkpoint
from instar.distributed.failure import RunFailed
from instar.distributed.rank_log import RankLog
from instar.distributed.signals import StopSignal
from instar.record import device as record_device
from instar.record.events import Skip, Train, read_events
from instar.record.rundir import find_run
from instar.run.load_config import load_run_config
from instar.run.resume import Resume
from instar.run.step.hooks import HookContext
from instar.run.worker import run

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
def gpu() -> Iterator[fake_gpu.Gpu]:
    with fake_gpu.device() as device:
        yield device


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Losses:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "squares.txt").write_text(TEXT)
    (tmp_path / "tiny.yaml").write_text(TINY)

    def train_run(name: str, *overrides: str, hooks: Sequence[object] = ()) -> list[float]:
        train("tiny.yaml", [*overrides, f"record.run_dir={name}"], hooks=hooks)
        return read_losses(tmp_path / name)

    return train_run


class Reads(TorchFunctionMode):
    """Counts what the host reads from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        on_gpu = bool(args) and isinstance(args[0], fake_gpu.PretendedTensor)
        if on_gpu and func.__name__ in {"item", "tolist", "cpu", "__bool__", "__float__"}:
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class NotFinite:
    """A hook that makes the gradients of some steps NaN, and notes the weights after each step's update."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.weights = steps, list[Tensor]()

    def on_step_begin(self, run: HookContext) -> None:
        weight = next(run.model.parameters())
        self.weights.append(weight.detach().to("cpu", copy=True))
        if run.step in self.steps:
            handle = weight.register_hook(
                lambda gradient: (handle.remove(), gradient * math.nan)[1]
            )


def read_losses(run_dir: Path) -> list[float]:
    events = read_events(run_dir / "events.jsonl")
    return [event.loss for event in events if isinstance(event, Train)]


def resume(run_dir: Path, *overrides: str) -> list[float]:
    resumption = Resume(find_run(str(run_dir)), fresh=True)
    with StopSignal() as signal, RankLog(0) as log:
        run(load_run_config(str(resumption.run.config), overrides), log, signal, resumption)
    return read_losses(run_dir)


@parametrize_first(
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
    first=2,
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
    with fake_gpu.device():
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
    expected = losses("whole", drops)
    losses("parts", drops, "train.until=2it")
    assert resume(tmp_path / "parts", "train.until=4it") == expected
    weights = load_checkpoint(tmp_path / "parts" / "checkpoints" / "step-4").tensors("model")
    assert all(type(tensor) is torch.Tensor for tensor in weights.values())


@pytest.mark.usefixtures("gpu")
def test_states_of_parameters_that_are_not_contiguous_are_resumed(
    losses: Losses, tmp_path: Path
) -> None:
    (tmp_path / "tiny.yaml").write_text(states.CONFIG)
    kind = ("model.kind=channels last", "test.at_end=false")
    expected = losses("whole", *kind)
    losses("parts", *kind, "train.until=5it")
    assert resume(tmp_path / "parts", f"train.until={states.STEPS}it") == expected


def test_samples_are_pinned_by_the_thread_that_reads_ahead(
    losses: Losses, gpu: fake_gpu.Gpu
) -> None:
    losses("run", "checkpoint.asynchronous=false")
    assert set(gpu.pinned_by) == {"instar-prefetch"}
    assert any(
        transfer.to == "cuda" and transfer.is_pinned and not transfer.waits
        for transfer in gpu.transfers
    )


def test_only_the_generators_in_use_are_seeded(losses: Losses, gpu: fake_gpu.Gpu) -> None:
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
    measure = record_device.measure_peak_flops

    def record_mode(*args: Any) -> float:
        modes.append(torch.get_float32_matmul_precision())
        return measure(*args)

    monkeypatch.setattr(record_device, "measure_peak_flops", record_mode)
    with fake_gpu.device():
        losses("run", "train.until=1it", *how)
    assert set(modes) == {mode}
    assert torch.get_float32_matmul_precision() == "highest"


WAYS = parametrize_first(
    "how",
    [[], ["optimizer.name=muon"], ["train.ema=0.9", "train.clip=0.01"]],
    first=1,
    ids=["adamw", "muon", "ema"],
)


@WAYS
def test_a_step_reads_nothing_from_the_device(losses: Losses, how: list[str]) -> None:
    reads = Reads()
    counts = []

    class Watches:
        def on_step_begin(self, run: HookContext) -> None:
            counts.append((run.step, sum(reads.counts.values())))

    with reads, fake_gpu.device():
        quiet = ["record.log_interval=100", "eval.eval_interval=100", "checkpoint.every_steps=100"]
        losses("run", *quiet, *how, hooks=[Watches()])
    read_counts = dict(counts)
    assert read_counts[1] > read_counts[0]  # the first step is recorded
    assert read_counts[3] == read_counts[1]


@WAYS
@parametrize_first("bad", [(1,), (1, 2)], first=2, ids=["one", "two in a row"])
def test_a_gpu_skips_the_steps_that_a_host_would_skip(
    losses: Losses, tmp_path: Path, bad: tuple[int, ...], how: list[str]
) -> None:
    on_cpu, on_gpu = NotFinite(*bad), NotFinite(*bad)
    cpu_losses = losses("cpu", "device=cpu", *how, hooks=[on_cpu])
    with fake_gpu.device():
        assert losses("gpu", "device=cuda", *how, hooks=[on_gpu]) == pytest.approx(
            cpu_losses, rel=1e-4
        )
    for weights in (on_cpu.weights, on_gpu.weights):
        same = [torch.equal(a, b) for a, b in pairwise(weights)]
        assert same == [step in bad for step in range(len(same))]
    skips = [
        [
            event
            for event in read_events(tmp_path / name / "events.jsonl")
            if isinstance(event, Skip)
        ]
        for name in ("cpu", "gpu")
    ]
    skip_steps = [[(event.step, event.consecutive) for event in events] for events in skips]
    assert (
        skip_steps[0] == skip_steps[1] == [(step + 1, number) for number, step in enumerate(bad, 1)]
    )
    checkpoints = [
        load_checkpoint(tmp_path / name / "checkpoints" / "step-4") for name in ("cpu", "gpu")
    ]
    for part in ("model", "optimizer", *(["ema"] if "train.ema=0.9" in how else [])):
        cpu_state, gpu_state = (checkpoint.tensors(part) for checkpoint in checkpoints)
        assert cpu_state.keys() == gpu_state.keys()
        for name, value in cpu_state.items():
            torch.testing.assert_close(gpu_state[name], value, rtol=1e-3, atol=1e-6)
            assert not name.endswith("/step") or value == 4 - len(bad)


@pytest.mark.usefixtures("gpu")
def test_a_run_whose_last_steps_are_not_finite_fails(losses: Losses, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="step 4: the gradient was not finite for 2 steps in a row"):
        losses("run", "train.max_skipped_steps=2", hooks=[NotFinite(2, 3)])
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [event.step for event in events if isinstance(event, Skip)] == [3, 4]


def test_background_saves_copy_to_pinned_memory_without_waiting(
    losses: Losses, gpu: fake_gpu.Gpu, tmp_path: Path
) -> None:
    losses("run", "checkpoint.every_steps=1", "train.ema=0.9")
    assert gpu.calls["Event.synchronize"] > 0
    assert any(transfer.to == "cpu" and not transfer.waits for transfer in gpu.transfers)
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        assert load_checkpoint(path).tensors("model")


@parametrize_first("strategy", ["sharded", "dispatched"], first=1)
def test_two_ranks_train_under_ddp_with_nccl_as_one_does(
    losses: Losses, tmp_path: Path, forks: Forks, strategy: str
) -> None:
    """What NCCL would send goes over gloo."""
    expected = losses("one", "device=cpu")
    sets = ["record.run_dir=two", "device=cuda", f"data.strategy={strategy}"]
    argv = ["train", "tiny.yaml", *(word for text in sets for word in ("--set", text))]
    ranks = children_as_ranks(forks, 2, "fake_gpu:one_gpu_each", argv, place=tmp_path)
    assert codes(ranks) == [0, 0], output_of(ranks)
    assert read_losses(tmp_path / "two") == pytest.approx(expected, rel=1e-5)
    assert "cpu:gloo,cuda:nccl" in output_of(ranks)
