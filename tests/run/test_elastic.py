"""`reproducible: elastic`: that any number of ranks comes to the same bits is in tests/torture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forks import forks
from started import start_instar

from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.distributed.all_reduce import DeterministicAllReduce
from instar.run.start.preflight import preflight
from instar.run.trainer import Trainer

Make = Callable[..., Trainer]
Losses = Callable[[str], list[float]]

ELASTIC = ["reproducible=elastic", "train.batch_size=3", "train.gradient_accumulation_steps=9"]


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


@pytest.mark.parametrize("noise_every", [0, 1])
def test_a_failure_is_heard_before_the_ranks_meet(
    trainer: Make, monkeypatch: pytest.MonkeyPatch, noise_every: int
) -> None:
    """All slices are run, then the others are heard, then gradients travel: those of a part of the
    batch first, where the noise is measured."""
    run = trainer(*ELASTIC, f"record.noise_every={noise_every}")
    calls = []
    root = DeterministicAllReduce.root
    task_loss = run.parts.task.loss_sum

    def loss_sum(*arguments: object) -> torch.Tensor:
        calls.append("forward")
        return task_loss(*arguments)  # type: ignore[arg-type]

    def meet(tree: object) -> torch.Tensor:
        calls.append("meet")
        total: torch.Tensor = root(tree)
        return total

    monkeypatch.setattr(run.parts.task, "loss_sum", loss_sum)
    monkeypatch.setattr(DeterministicAllReduce, "root", meet)
    monkeypatch.setattr(run.parts.sync, "finish", lambda *_: calls.append("heard"))
    run.step()
    passes = ["forward"] * 11
    part = [*["forward"] * 4, "heard", "meet", *passes, "meet"]
    assert calls == (part if noise_every else [*passes, "heard", "meet"])


def test_ranks_that_cannot_share_are_refused_by_name(
    config: Callable[..., Loaded],
) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(config(*ELASTIC), world_size=3)
    assert "3 ranks cannot share 4 virtual ranks evenly; use 1, 2 or 4 ranks" in str(caught.value)


def test_a_rank_that_cannot_read_ends_all_before_gradients_travel(
    config: Callable[..., Loaded], tmp_path: Path
) -> None:
    path, run_dir = tmp_path / "run.yaml", tmp_path / "run"
    endless = ["train.until=[100000it]", "learning_rate.lr_decay_iters=100000"]
    loaded_config = config("reproducible=elastic", *endless)
    path.write_text(loaded_config.to_yaml(origin=False), encoding="utf-8")
    script = Path(__file__).parents[1] / "support" / "rank_1_cannot_read.py"
    run = start_instar(path, run_dir=run_dir, command=[forks().python, script])
    assert "rank 1 failed at step 6: OSError: the disk is gone" in run.finish(4)
    other = (run_dir / "logs" / "rank_0.log").read_text(encoding="utf-8")
    assert "rank 1 failed while in step 6: OSError: the disk is gone" in other
