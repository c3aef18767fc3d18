"""The same runs on CUDA devices, on all that there are; `make test-gpu` runs these."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from instar.api.training import train
from instar.checkpoint.store import load_checkpoint
from instar.config.load import load_config
from instar.extensions.delta.chain import find_link, links
from instar.extensions.delta.chain import load_state as load_link
from instar.run.start.preflight import preflight
from instar.run.step.hooks import HookContext

pytestmark = pytest.mark.gpu

Losses = Callable[..., list[float]]

GPUS = torch.cuda.device_count()
SEVERAL = pytest.mark.parametrize("ranks", [GPUS] if GPUS > 1 else [])

TEXT = "".join(f"{n} squared is {n * n}, and {n} cubed is {n**3}.\n" for n in range(300))
TINY = """\
name: tiny
precision: fp32
preset: llama
model: {n_layer: 2, n_head: 2, n_embd: 64, context: 32, qk_norm: true, conv_size: 4, embedding_multiplier: 8.0}
data: {source: squares.txt, path: tokens, tokenizer: char}
train: {until: 30it, batch_size: 8, gradient_accumulation_steps: 2}
learning_rate: {warmup_iters: 5}
optimizer: {lr: 3e-3}
record: {log_interval: 1}
"""


@pytest.fixture
def losses(tmp_path: Path) -> Losses:
    assert torch.cuda.is_available(), "these tests need a CUDA device"
    (tmp_path / "squares.txt").write_text(TEXT)
    (tmp_path / "tiny.yaml").write_text(TINY)

    def train_run(name: str, *overrides: str, ranks: int = 1) -> list[float]:
        command = [sys.executable, "-m", "instar.cli.main", "train", "tiny.yaml"]
        command += ["--nproc", str(ranks)] if ranks > 1 else []
        for text in (*overrides, f"record.run_dir={name}"):
            command += ["--set", text]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        events = map(json.loads, (tmp_path / name / "events.jsonl").read_text().splitlines())
        return [event["loss"] for event in events if event["kind"] == "train"]

    return train_run


def test_a_gpu_follows_the_curve_of_a_cpu(losses: Losses) -> None:
    assert losses("gpu", "device=cuda", "tf32=false") == pytest.approx(
        losses("cpu", "device=cpu"), rel=2e-3
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_follows_fp32(losses: Losses, precision: str) -> None:
    low = losses("low", "device=cuda", f"precision={precision}")
    assert low == pytest.approx(losses("full", "device=cuda"), rel=3e-2)


def test_auto_is_bf16_on_a_gpu_that_has_it(losses: Losses, tmp_path: Path) -> None:
    auto = losses("auto", "device=cuda", "precision=auto")
    assert auto == losses("bf16", "device=cuda", "precision=bf16")
    assert "precision: bf16" in (tmp_path / "auto" / "run.yaml").read_text(encoding="utf-8")


def test_a_compiled_model_follows_the_eager_one(losses: Losses) -> None:
    compiled = losses("compiled", "device=cuda", "compile=true")
    assert compiled == pytest.approx(losses("eager", "device=cuda"), rel=5e-3)


def test_muon_learns_on_a_gpu(losses: Losses) -> None:
    curve = losses("muon", "device=cuda", "optimizer.name=muon", "precision=bf16")
    assert curve[-1] < 0.8 * curve[0]


def test_as_many_ranks_as_gpus_are_one_run(losses: Losses) -> None:
    expected = losses("one", "device=cuda")
    all_of_them = losses("all", "device=cuda", ranks=GPUS)
    assert all_of_them == pytest.approx(expected, rel=2e-3)


def test_a_gpu_that_is_not_there_is_refused(losses: Losses, tmp_path: Path) -> None:
    del losses
    result = subprocess.run(
        [sys.executable, "-m", "instar.cli.main", "train", "tiny.yaml", "--set", "device=cuda:99"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "cuda:99 does not exist" in result.stderr


def test_deltas_hold_the_weights_of_the_checkpoints_of_their_steps(
    losses: Losses, tmp_path: Path
) -> None:
    saving = ("checkpoint.every_steps=10", "checkpoint.delta.every=1")
    assert losses("saved", "device=cuda", *saving) == losses("plain", "device=cuda")
    folder = tmp_path / "saved" / "deltas"
    for step in (10, 20, 30):
        weights = load_checkpoint(tmp_path / "saved" / "checkpoints" / f"step-{step}").tensors(
            "model"
        )
        delta_weights = load_link(folder, find_link(links(folder), step=step).number)
        assert all(torch.equal(delta_weights[name], weight) for name, weight in weights.items())


def test_a_model_grows_on_a_gpu_as_on_a_cpu(losses: Losses) -> None:
    schedule = [
        {"name": "insert_layers", "value": 1, "when": {"at_step": 5}},
        {"name": "widen_hidden", "value": 96, "when": {"at_step": 10}, "mask": 4},
        {"name": "set_lora_rank", "value": {"target": "mlp", "rank": 4}, "when": {"at_step": 20}},
    ]
    grows = f"schedule={json.dumps(schedule)}"
    on_cpu = losses("cpu", "device=cpu", grows)
    assert losses("gpu", "device=cuda", grows) == pytest.approx(on_cpu, rel=5e-3)
    assert losses("compiled", "device=cuda", "compile=true", grows) == pytest.approx(
        on_cpu, rel=1e-2
    )


def test_a_run_resumes_where_it_was_saved(losses: Losses, tmp_path: Path) -> None:
    drops = ("device=cuda", "model.dropout=0.1", "train.ema=0.9", "precision=bf16")
    drops += ("learning_rate.lr_decay_iters=30",)  # also of the part
    expected = losses("whole", *drops)
    losses("parts", *drops, "train.until=15it")
    command = [sys.executable, "-m", "instar.cli.main", "resume", "parts", "--until", "30it"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    events = map(json.loads, (tmp_path / "parts" / "events.jsonl").read_text().splitlines())
    actual = [event["loss"] for event in events if event["kind"] == "train"]
    assert actual == pytest.approx(expected, rel=1e-3)


@SEVERAL
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_ranks_with_shards_are_one_run(losses: Losses, ranks: int, optimizer: str) -> None:
    how = ("device=cuda", f"optimizer.name={optimizer}")
    actual = losses("all", *how, "parallel.strategy=fsdp", ranks=ranks)
    assert actual == pytest.approx(losses("one", *how), rel=2e-3)


@SEVERAL
def test_elastic_runs_have_one_hash(losses: Losses, tmp_path: Path, ranks: int) -> None:
    elastic = ("device=cuda", "reproducible=elastic", f"parallel.elastic.virtual_ranks={ranks}")
    losses("one", *elastic)
    first = load_checkpoint(tmp_path / "one" / "checkpoints" / "step-30").tensors("model")
    for strategy in ("ddp", "fsdp"):
        losses(strategy, *elastic, f"parallel.strategy={strategy}", ranks=ranks)
        weights = load_checkpoint(tmp_path / strategy / "checkpoints" / "step-30").tensors("model")
        assert all(torch.equal(weights[name], tensor) for name, tensor in first.items()), strategy


@SEVERAL
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_lost_rank_is_named(losses: Losses, tmp_path: Path, ranks: int, strategy: str) -> None:
    del losses
    command = [sys.executable, "-m", "instar.cli.main", "train", "tiny.yaml"]
    command += ["--nproc", str(ranks), "--until", "1000000it"]
    for text in ("device=cuda", f"parallel.strategy={strategy}", "record.run_dir=run"):
        command += ["--set", text]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as launcher:
        events, log = tmp_path / "run" / "events.jsonl", tmp_path / "run" / "logs" / "rank_1.log"
        while not (events.exists() and '"train"' in events.read_text() and log.exists()):
            with pytest.raises(subprocess.TimeoutExpired):
                launcher.wait(0.2)
        rank_1 = next(
            child
            for child in psutil.Process(launcher.pid).children(recursive=True)
            if child.environ().get("RANK") == "1"
        )
        rank_1.send_signal(signal.SIGKILL)
        _, errors = launcher.communicate(timeout=150)
    assert launcher.returncode == 4
    assert "rank 1" in errors


@pytest.mark.parametrize(
    "more", [(), ("optimizer.name=muon",), ("train.ema=0.9",)], ids=["adamw", "muon", "ema"]
)
def test_a_step_does_not_wait_for_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "squares.txt").write_text(TEXT)
    (tmp_path / "tiny.yaml").write_text(TINY)

    class Strict:
        """Makes torch raise where the host waits, but for the first step and those that are recorded."""

        def on_step_begin(self, run: HookContext) -> None:
            with warnings.catch_warnings(action="ignore"):  # it says that it is a prototype
                torch.cuda.set_sync_debug_mode("error" if 0 < run.step % 10 < 9 else "default")

    how = ("device=cuda", "precision=bf16", "record.log_interval=10")
    quiet = ("eval.eval_interval=1000", "record.report=false", "record.run_dir=run")
    try:
        train("tiny.yaml", [*how, *quiet, *more], hooks=[Strict()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    events = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    assert [event["step"] for event in events if event["kind"] == "train"] == [1, 10, 20, 30]


def test_the_forecast_of_memory_is_what_is_allocated(
    losses: Losses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    size = ["model.n_layer=8", "model.n_embd=512", "model.n_head=8", "model.context=512"]
    for precision in ("bf16", "fp32"):
        how = ["device=cuda", f"precision={precision}", "train.batch_size=16", "train.until=3it"]
        losses(precision, *size, *how)
        config = load_config(str(tmp_path / precision / "run.yaml"), ["record.run_dir=new"])
        (stage,) = preflight(config, 1).forecast.stages
        events = map(json.loads, (tmp_path / precision / "events.jsonl").read_text().splitlines())
        used = max(event["memory_bytes"] for event in events if event["kind"] == "train")
        ratio = used / sum(stage.memory_bytes.values())
        print(f"{precision}: allocated / forecast {ratio:.2f}")
        assert 0.7 < ratio < 1.15
