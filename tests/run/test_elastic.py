"""`reproducible: elastic`: the same bits on any number of ranks; the rest is as ever."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forks import forks
from started import run_ranks, start_instar

from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.data.loader import plan_step
from instar.distributed.all_reduce import DeterministicAllReduce
from instar.run.lifecycle.preflight import Prepared, preflight
from instar.run.loop.trainer import Trainer

Make = Callable[..., Trainer]
Losses = Callable[[str], list[float]]

ELASTIC = ["reproducible=elastic", "train.batch_size=3", "train.gradient_accumulation_steps=9"]
STEPS = 40
EVERYTHING = [
    *ELASTIC,
    "model.dropout=0.1",
    "optimizer.name=muon",
    "train.ema=0.9",
    f"train.until=[{STEPS}it]",
    f"learning_rate.lr_decay_iters={STEPS}",
    "eval.eval_interval=10",
]


def test_a_step_is_the_same_step_up_to_rounding(trainer: Make, losses: Losses) -> None:
    trainer(*ELASTIC[1:], name="fixed").train()
    trainer(*ELASTIC, name="elastic").train()
    assert losses("elastic") == pytest.approx(losses("fixed"), rel=1e-5)


def test_more_virtual_ranks_are_another_run(trainer: Make, losses: Losses) -> None:
    trainer(*ELASTIC, name="four").train()
    trainer(*ELASTIC, "parallel.elastic.virtual_ranks=8", name="eight").train()
    assert losses("four") != losses("eight")


def test_what_the_environment_says_of_threads_does_not_matter(trainer: Make) -> None:
    trainer(*ELASTIC, "parallel.elastic.threads=2", name="two")
    assert torch.get_num_threads() == 2
    trainer(*ELASTIC, name="one")
    assert torch.get_num_threads() == 1


def test_a_failure_is_heard_before_the_ranks_meet(
    trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All slices are run, then the others are heard, then gradients travel."""
    run = trainer(*ELASTIC)
    heard = []
    root = DeterministicAllReduce.root
    task_loss = run.parts.task.loss_sum

    def loss_sum(*arguments: object) -> torch.Tensor:
        heard.append("forward")
        return task_loss(*arguments)  # type: ignore[arg-type]

    def meet(tree: object) -> torch.Tensor:
        heard.append("meet")
        found: torch.Tensor = root(tree)
        return found

    monkeypatch.setattr(run.parts.task, "loss_sum", loss_sum)
    monkeypatch.setattr(DeterministicAllReduce, "root", meet)
    monkeypatch.setattr(run.parts.sync, "finish", lambda *_: heard.append("heard"))
    run.step()
    assert heard == ["forward"] * 11 + ["heard", "meet"]


def test_ranks_that_cannot_share_are_refused_by_name(
    config: Callable[..., Loaded],
) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(config(*ELASTIC), world_size=3)
    assert "3 ranks cannot share 4 virtual ranks evenly; use 1, 2 or 4 ranks" in str(caught.value)


def result(run_dir: Path) -> tuple[dict[str, bytes], list[list[float]]]:
    """All weights, moments and averages at the end, and all losses and gradient norms."""
    folder = run_dir / "checkpoints" / f"step-{STEPS}"
    lines = (run_dir / "events.jsonl").read_text("utf-8").splitlines()
    events = [event for event in map(json.loads, lines) if event["kind"] in ("train", "eval")]
    return (
        {file.name: file.read_bytes() for file in folder.glob("*.safetensors")},
        [[event["loss"], event.get("grad_norm", 0.0)] for event in events],
    )


def test_a_run_and_one_that_changes_its_ranks_end_bit_for_bit_alike(
    config: Callable[..., Loaded], prepared: Callable[..., Prepared], tmp_path: Path
) -> None:
    """With dropout, accumulation, and last batches of which some slices have nothing."""
    samples = prepared(*EVERYTHING).forecast.samples_per_epoch
    last = plan_step(samples - samples % 27, samples, 27).count
    assert 0 < last < 4, "the corpus no longer ends an epoch with fewer samples than slices"

    path = tmp_path / "run.yaml"
    path.write_text(config(*EVERYTHING).to_yaml(origin=False), encoding="utf-8")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(2, tmp_path, "train", path, "--set", f"record.run_dir={whole}")
    run = start_instar(path, run_dir=parts)
    run.wait_for(r"^ *7 .*loss")
    run.interrupt()
    run.finish(75)
    run_ranks(4, tmp_path, "resume", parts)
    assert set(result(whole)[0]) == {
        "model.safetensors",
        "optimizer.safetensors",
        "ema.safetensors",
    }
    assert result(parts) == result(whole)


def test_a_rank_that_cannot_read_ends_all_before_gradients_travel(
    config: Callable[..., Loaded], tmp_path: Path
) -> None:
    path, run_dir = tmp_path / "run.yaml", tmp_path / "run"
    endless = ["train.until=[100000it]", "learning_rate.lr_decay_iters=100000"]
    loaded = config("reproducible=elastic", *endless)
    path.write_text(loaded.to_yaml(origin=False), encoding="utf-8")
    script = Path(__file__).parents[1] / "support" / "rank_1_cannot_read.py"
    run = start_instar(path, run_dir=run_dir, command=[forks().python, script])
    assert "rank 1 failed at step 6: OSError: the disk is gone" in run.finish(4)
    other = (run_dir / "logs" / "rank_0.log").read_text(encoding="utf-8")
    assert "rank 1 failed while in step 6: OSError: the disk is gone" in other
