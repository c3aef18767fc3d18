"""Last steps of epochs: tried before a run, or left out by `data.drop_last`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import science
from tiny_run import Place, codes, events, output_of, weights

from instar.checkpoint.store import load_checkpoint
from instar.cli.main import main
from instar.config.errors import ConfigError
from instar.config.load import load_config
from instar.distributed.world import World
from instar.run.start.preflight import preflight
from instar.run.start.smoke_test_step import run_trial

NORMED = (
    "task=drop_last:Norm",
    "data.samples=77",  # 33 to train on
    "train.until=[2ep]",
    "early_stopping.rules=[]",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=20",
    "test.at_end=false",
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    return science.place(tmp_path)


def try_run(*keys: str, ranks: int = 1) -> list[str]:
    import torch

    loaded_config = load_config("run.yaml", [*NORMED, "precision=fp32", *keys])
    return run_trial(
        preflight(loaded_config, ranks), World(0, 0, ranks, torch.device("cpu"), "gloo")
    )


SCHEDULE = "schedule=[{{name: set_batch_size, value: {}, when: {{at_step: 2}}}}]"


@pytest.mark.parametrize(
    ("keys", "ranks", "when"),
    [
        ((), 1, "in an epoch's last step, of 1 of 8 samples on 1 rank"),
        (("data.samples=78",), 2, "in an epoch's last step, of 2 of 8 samples on 2 ranks"),
        (("train.batch_size=2", "data.samples=78"), 2, "in steps of 2 on 2 ranks"),
        (
            (SCHEDULE.format(16), "train.batch_size=11"),
            1,
            "in an epoch's last step, of 1 of 16 samples on 1 rank",
        ),
        (
            ("reproducible=elastic", "parallel.elastic.virtual_ranks=8"),
            1,
            "in steps of 8 on 8 virtual ranks",
        ),
    ],
)
@pytest.mark.usefixtures("place")
def test_a_size_of_micro_batch_that_fails_is_refused_before_the_run(
    keys: tuple[str, ...], ranks: int, when: str
) -> None:
    with pytest.raises(ConfigError, match="Expected more than 1 value per channel") as caught:
        try_run(*keys, ranks=ranks)
    assert f"the loss of a micro-batch of 1 sample, as {when}" in str(caught.value)
    assert ("data.drop_last: true leaves out" in str(caught.value)) == ("last step" in when)


@pytest.mark.parametrize(
    "keys",
    [
        ("data.drop_last=true",),
        ("train.until=[4it]",),
        (SCHEDULE.format(10), "train.batch_size=11", "train.until=[3it]"),
    ],
)
@pytest.mark.usefixtures("place")
def test_a_run_is_not_refused_for_steps_that_it_does_not_come_to(keys: tuple[str, ...]) -> None:
    assert try_run(*keys) == []


@pytest.mark.usefixtures("place")
def test_an_epoch_without_a_whole_batch_is_refused() -> None:
    for keys in (("train.batch_size=34",), (SCHEDULE.format(40), "train.batch_size=11")):
        with pytest.raises(ConfigError, match=r"leaves out every sample.* an epoch has 33 samples"):
            try_run("data.drop_last=true", *keys)


def steps_of(run_dir: Path) -> list[tuple[int, float]]:
    return [(event["tokens"], event["loss"]) for event in events(run_dir, "train")]


@pytest.mark.torture
@pytest.mark.parametrize("ranks", [2, 1])
def test_whole_steps_only_also_after_a_resume_anywhere(place: Place, ranks: int) -> None:
    keys = (*NORMED, "task=science:Halves", "data.drop_last=true", "train.batch_size=10")
    totals = preflight(load_config("run.yaml", keys), ranks).forecast.early
    children = place.train(place.path / "whole", *keys, ranks=ranks)
    assert codes(children) == [0] * ranks, output_of(children)
    expected = steps_of(place.path / "whole")
    assert [tokens for tokens, _ in expected] == [10, 20, 30, 40, 50, 60]
    progress = load_checkpoint(place.path / "whole" / "checkpoints" / "step-6").state["progress"]
    assert totals is not None
    assert (progress["step"], progress["samples"], progress["tokens"]) == (6, 66, 60)
    assert (totals.steps, totals.samples, totals.tokens) == (6, 66, 60)
    for at in (2, 3):  # before and after the samples that are left out
        run_dir = place.path / f"at-{at}"
        children = place.train(run_dir, *keys, f"train.until=[{at}it]", ranks=ranks)
        assert codes(children) == [0] * ranks, output_of(children)
        children = place.resume(run_dir, "--until", "2ep", ranks=3 - ranks)
        assert codes(children) == [0] * (3 - ranks), output_of(children)
        actual = steps_of(run_dir)
        assert actual == [(tokens, pytest.approx(loss)) for tokens, loss in expected]
    run_dir = place.path / "again"
    assert codes(place.train(run_dir, *keys, "train.until=[3it]", ranks=ranks)) == [0] * ranks
    assert codes(place.resume(run_dir, "--until", "2ep", ranks=ranks)) == [0] * ranks
    assert weights(run_dir, 6) == weights(place.path / "whole", 6)


@pytest.mark.parametrize("late", [False, True])
def test_a_size_that_a_resume_brings_is_tried_before_it_goes_on(
    place: Place, capfd: pytest.CaptureFixture[str], late: bool
) -> None:
    """A loss that fails later only ends the run at that step, and says what helps."""
    run = place.path / "run"
    keys = [*NORMED, *(["task=drop_last:Late"] if late else [])]
    words = [word for key in keys for word in ("--set", key)]
    first = ["--set", "train.batch_size=11", "--until", "2it", "--set", f"record.run_dir={run}"]

    def run_command(*argv: str) -> Any:
        code = main(argv)
        return code, capfd.readouterr().err

    assert run_command("train", "run.yaml", *words, *first)[0] == 0
    before = (run / "events.jsonl").read_bytes()
    # of the 11 samples that are left of the epoch, the last would be alone
    smaller = ("--set", "train.batch_size=5", "--until", "2ep")
    code, message = run_command("resume", str(run), *smaller)
    assert "Expected more than 1 value per channel" in message
    if late:
        assert code == 4
        assert "an epoch's last 1 of 5 samples, which data.drop_last: true leaves out" in message
    else:
        assert code == 2
        assert "a micro-batch of 1 sample, as in an epoch's last step, of 1 of 5 samples" in message
        assert "data.drop_last: true leaves out" in message
        assert (run / "events.jsonl").read_bytes() == before
        # such a step does not come
        assert run_command("resume", str(run), *smaller[:2], "--until", "4it")[0] == 0
    drop = ("--set", "data.drop_last=true", *(() if late else smaller))
    code, message = run_command("resume", str(run), *drop)
    assert code == 0, message
    assert [event["tokens"] for event in events(run, "train")][-2:] == [57, 62]


def test_a_size_that_the_rest_of_the_schedule_makes_of_a_changed_one_is_tried(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    run = place.path / "run"
    schedule = "schedule=[{name: change_batch_size, value: 0.5, when: {at_step: 4}}]"
    words = [word for key in (*NORMED, schedule) for word in ("--set", key)]
    keys = ["--set", "train.batch_size=8", "--set", "data.drop_last=true", "--until", "2it"]
    assert main(["train", "run.yaml", *words, *keys, "--set", f"record.run_dir={run}"]) == 0
    assert main(["resume", str(run), "--set", "train.batch_size=2", "--until", "8it"]) == 2
    assert "a micro-batch of 1 sample, as in steps of 1 on 1 rank" in capfd.readouterr().err
