"""One schedule gives a family: a trunk that grows, and branches that decay to ends of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forks import INSTAR, children_as_ranks, forks
from started import run_ranks

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.manifest import read_manifest
from instar.checkpoint.store import load_checkpoint
from instar.config.errors import ConfigError
from instar.distributed.failure import RunFailed
from instar.record.events import Branched, Event, OperationEvent, RunStarted, read_events
from instar.record.rundir import RunDir, hold
from instar.run import worker
from instar.run.start.preflight import preflight, prepare_run_data
from instar.schedule.checks import load_checked
from instar.schedule.forecast import forecast
from instar.schedule.render import render

STEPS = 14
GROW = {"name": "insert_layers", "value": 1, "when": {"waited": 8}}
SMALL = {"name": "branch", "value": "small", "when": {"at_step": 6}, "iters": 6, "decay": 3}
BIG = {
    "name": "branch",
    "value": "big",
    "when": {"at_step": 10},
    "iters": 4,
    "set": {"train.batch_size": 3},
    "schedule": [{"name": "widen_mlp", "value": "x2", "when": {"waited": 2}}],
}
FAMILY = [SMALL, GROW, BIG]
ENDS = {"trunk": STEPS, "trunk.small": 12, "trunk.big": 14}

CONFIG = """\
name: tiny
model: {{n_layer: 2, n_head: 2, n_embd: 32, context: 16, dropout: 0.1}}
data: {{source: {corpus}/squares.txt, path: {corpus}/tokens, tokenizer: char}}
train: {{until: {steps}it, batch_size: 4, ema: 0.9}}
learning_rate: {{warmup_iters: 2, shape: constant}}
eval: {{eval_interval: 4}}
checkpoint: {{every_steps: 4, keep_last: 9}}
record: {{sample_tokens: 0, report: false}}
"""


@pytest.fixture(scope="module")
def cfg(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a trunk whose rate is constant, without a schedule; its data set is there."""
    path = tmp_path_factory.mktemp("branches") / "run.yaml"
    path.write_text(CONFIG.format(corpus=corpus, steps=STEPS), encoding="utf-8")
    prepare_run_data(load_checked(str(path)), 1, lambda _: None)
    return path


@pytest.fixture(scope="module")
def original_trunk(cfg: Path) -> Path:
    """A family after its training, one rank; not to be changed."""
    train(cfg, cfg.parent / "trunk", FAMILY)
    return cfg.parent / "trunk"


@pytest.fixture
def family(original_trunk: Path, tmp_path: Path) -> Path:
    """A copy of the trunk and of its branches."""
    for run in ENDS:
        shutil.copytree(original_trunk.with_name(run), tmp_path / run)
    return tmp_path / "trunk"


def train(cfg: Path, run_dir: Path, schedule: object, *overrides: str, ranks: int = 1) -> None:
    settings = (f"record.run_dir={run_dir}", f"schedule={json.dumps(schedule)}", *overrides)
    run_ranks(
        ranks, cfg.parent, "train", cfg, *(word for text in settings for word in ("--set", text))
    )


def weights(run: Path, step: int) -> dict[str, bytes]:
    folder = run / "checkpoints" / f"step-{step}"
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*.safetensors")
    }


def events(run: Path) -> list[Event]:
    return list(read_events(run / "events.jsonl"))


WSD = (
    *("learning_rate.shape=wsd", "learning_rate.lr_decay_iters=12"),
    *("learning_rate.decay_fraction=0.25", "train.until=[12it]"),
)


def test_a_trunk_is_as_without_branches(cfg: Path, original_trunk: Path, tmp_path: Path) -> None:
    assert sorted(path.name for path in original_trunk.parent.glob("trunk*")) == sorted(ENDS)
    for run, step in ENDS.items():
        assert latest_checkpoint(original_trunk.with_name(run)).name == f"step-{step}"
    train(cfg, tmp_path / "plain", [GROW])
    assert weights(tmp_path / "plain", STEPS) == weights(original_trunk, STEPS)


def test_a_branch_is_as_a_run_that_decays(cfg: Path, original_trunk: Path, tmp_path: Path) -> None:
    train(cfg, tmp_path / "wsd", [], *WSD)
    expected = weights(tmp_path / "wsd", 12)
    assert weights(original_trunk.with_name("trunk.small"), 12) == expected
    assert {name.split("/")[0].split(".")[0] for name in expected} == {
        *("model", "optimizer", "ema", "rng")
    }


@pytest.mark.torture
def test_ranks_that_share_a_model_save_its_branches(cfg: Path, tmp_path: Path) -> None:
    shared = "parallel.strategy=fsdp"
    train(cfg, tmp_path / "trunk", [SMALL], "train.until=[8it]", shared, ranks=2)
    train(cfg, tmp_path / "wsd", [], *WSD, shared, ranks=2)
    assert weights(tmp_path / "trunk.small", 12) == weights(tmp_path / "wsd", 12)


def resume(run: Path, *words: str, code: int = 0) -> str:
    (rank,) = children_as_ranks(forks(), 1, INSTAR, ["resume", str(run), *words], place=run.parent)
    assert rank.finish() == code, rank.output()
    return rank.output()


def test_a_branch_is_a_run_of_its_own_that_says_where_it_comes_from(original_trunk: Path) -> None:
    for name, step, layers in (("small", 6, 2), ("big", 10, 3)):
        run = original_trunk.with_name(f"trunk.{name}")
        first, start, *later_events = events(run)
        assert isinstance(first, Branched)
        assert isinstance(start, RunStarted)
        assert (first.name, first.parent, first.step) == (name, "trunk", step)
        assert start.resumed_from == first.checkpoint == f"step-{step}"
        assert start.architecture["n_layer"] == layers
        growth_names = [event.name for event in later_events if isinstance(event, OperationEvent)]
        assert growth_names == (["widen_mlp"] if name == "big" else [])
        config = load_checked(str(run / "run.yaml")).config
        assert config.train.until == (f"{step + (6 if name == 'small' else 4)}it",)
        assert config.train.batch_size == (3 if name == "big" else 4)
        # its best is one of its own evaluations
        best = (run / "checkpoints" / "best").read_text().strip()
        assert int(best.removeprefix("step-")) > step
    operations = [
        (event.name, event.value)
        for event in events(original_trunk)
        if isinstance(event, OperationEvent)
    ]
    assert operations == [("branch", "small"), ("insert_layers", 1), ("branch", "big")]


def test_nothing_is_done_twice(family: Path) -> None:
    members = [family.with_name(f"trunk.{name}") for name in ("small", "big")]
    before = [(run / "events.jsonl").read_bytes() for run in members]
    assert "nothing is left to train" in resume(family)
    resume(family, "--from", "4")
    assert [(run / "events.jsonl").read_bytes() for run in members] == before
    assert len(list(family.parent.glob("trunk*"))) == 3
    assert not list(family.parent.glob(".tmp-*"))
    output = resume(family, "--from", "4", "--set", "optimizer.lr=0.002")
    assert output.count("is the branch of an earlier course of this run") == 2
    assert [(run / "events.jsonl").read_bytes() for run in members] == before


def test_a_stop_in_a_branch_names_the_command_for_the_whole_family(
    cfg: Path, tmp_path: Path
) -> None:
    trunk, long = tmp_path / "trunk", [{**SMALL, "iters": 100_000}]
    settings = (
        f"record.run_dir={trunk}",
        f"schedule={json.dumps(long)}",
        "eval.eval_interval=9999",
    )
    words = ["train", str(cfg), *(word for text in settings for word in ("--set", text))]
    (rank,) = children_as_ranks(forks(), 1, INSTAR, words, place=tmp_path)
    assert rank.wait_for(r"^run trunk\.small ")
    assert rank.wait_for(r"^ *[2-9]\d .*loss")
    rank.signal(signal.SIGTERM)
    assert rank.finish() == 75, rank.output()
    assert rank.output().rstrip().endswith(f"resume with: instar resume {trunk}")
    assert latest_checkpoint(trunk).name == f"step-{STEPS}"
    assert int(latest_checkpoint(tmp_path / "trunk.small").name.removeprefix("step-")) > STEPS


def begin_again(branch: Path, first: str, *later: str) -> None:
    """Make a branch that has ended one that has not begun."""
    (branch / "checkpoints" / "latest").write_text(f"{first}\n")
    for step in later:
        shutil.rmtree(branch / "checkpoints" / step)
    lines = (branch / "events.jsonl").read_bytes().splitlines(keepends=True)
    (branch / "events.jsonl").write_bytes(lines[0])


def test_what_is_left_of_a_family_is_trained_at_a_resume(family: Path, tmp_path: Path) -> None:
    small, big = family.with_name("trunk.small"), family.with_name("trunk.big")
    expected = weights(small, 12)
    begin_again(small, "step-6", "step-8", "step-12")
    big.rename(tmp_path / "elsewhere")
    with hold(RunDir(small)):
        output = resume(family)
    assert (
        f"the branch small is being trained by process {os.getpid()}, and is left to it" in output
    )
    assert "the branch big is gone" in output
    assert latest_checkpoint(small).name == "step-6"
    resume(family)
    assert weights(small, 12) == expected


def test_a_branch_keeps_what_its_own_operations_set_at_a_resume(cfg: Path, tmp_path: Path) -> None:
    clips = [
        {"name": "set_clip", "value": clip, "when": {"at_step": n}} for n, clip in ((2, 2), (6, 4))
    ]
    branch = {**SMALL, "when": {"at_step": 4}, "iters": 3, "schedule": clips[1:]}
    train(cfg, tmp_path / "trunk", [clips[0], branch], "train.until=[5it]")
    run = tmp_path / "trunk.small"
    said = resume(run, "--until", "8it")
    assert "the last decay of this branch ends at step 7, and the rate stays at its lowest" in said
    last = load_checkpoint(latest_checkpoint(run)).manifest.history[-1]["operation"]
    assert (last["name"], last["value"]) == ("override", {"train.until": ["8it"]})


def test_a_branch_may_be_left_to_a_command_of_its_own(
    cfg: Path, original_trunk: Path, tmp_path: Path
) -> None:
    train(cfg, tmp_path / "trunk", [{**SMALL, "train": False}, GROW, BIG])
    small = tmp_path / "trunk.small"
    assert latest_checkpoint(small).name == "step-6"
    assert weights(tmp_path / "trunk.big", 14) == weights(original_trunk.with_name("trunk.big"), 14)
    assert "small" not in resume(tmp_path / "trunk")
    assert latest_checkpoint(small).name == "step-6"
    resume(small)
    assert weights(small, 12) == weights(original_trunk.with_name("trunk.small"), 12)


def test_a_branch_whose_config_is_lost_is_restored_and_ends_alike(family: Path) -> None:
    big = family.with_name("trunk.big")
    expected = weights(big, 14)
    begin_again(big, "step-10", "step-12", "step-14")
    (big / "run.yaml").unlink()
    words = ["checkpoint", "inspect", str(big), "--config"]
    (rank,) = children_as_ranks(forks(), 1, INSTAR, words, place=family.parent)
    assert rank.finish() == 0
    (big / "run.yaml").write_text(rank.output())
    resume(big)
    assert weights(big, 14) == expected


def test_a_folder_that_is_no_branch_is_not_taken_for_one(family: Path) -> None:
    """The folder of a run has its name only when it has begun, so another may be in the way."""
    record = family.with_name("trunk.small") / "events.jsonl"
    record.write_text(record.read_text().replace('"parent":"trunk"', '"parent":"x"'))
    before = record.read_bytes()
    output = resume(family, "--from", "4", code=4)
    assert "exists and is not the branch small of this run; move it away" in output
    assert record.read_bytes() == before
    skipping_schedule = [{**SMALL, "on_failure": "skip"}, GROW, BIG]
    resume(family, "--from", "4", "--set", f"schedule={json.dumps(skipping_schedule)}")
    history = read_manifest(latest_checkpoint(family)).history
    assert "is not the branch" in next(c["skipped"] for c in history if c["entry"] == 0)
    assert record.read_bytes() == before


def test_a_branch_that_is_a_link_is_not_trained(family: Path, tmp_path: Path) -> None:
    """It could be the branch of another run with the trunk's name."""
    branch = family.with_name("trunk.small")
    target = branch.rename(tmp_path / "mine")
    branch.symlink_to(target)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    assert "symbolic link, which is not followed" in resume(family, code=2)
    assert "symbolic link, which is not followed" in resume(family, "--from", "4", code=4)
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == before


def entry(**options: Any) -> Mapping[str, Any]:
    return {**SMALL, **options}


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([entry(value="../up")], "schedule[0].value must be the branch's name"),
        ([entry(value="a/b")], "schedule[0].value must be the branch's name"),
        ([entry(value=None)], "schedule[0].value must be the branch's name"),
        ([entry(iters=None)], "schedule[0].iters is missing"),
        ([entry(iters=2.5)], "schedule[0].iters must be a positive whole number, got 2.5"),
        ([entry(decay=7)], "schedule[0].decay must be a whole number from 0 to iters (6), got 7"),
        ([entry(train=3)], "schedule[0].train must be true or false, got 3; false: only"),
        ([entry(decays=3)], "schedule[0].decays is unknown; did you mean 'decay'?"),
        ([SMALL, entry(value="Small")], "schedule[1].value Small is the name of another branch"),
        ([entry(repeat=2)], "schedule[0].repeat is of no use: a branch has one name"),
        ([entry(set=3)], "schedule[0].set must have keys of the config"),
        ([entry(set={"model.n_layer": 3})], "set.model.n_layer is fixed when a run begins"),
        ([entry(set={"device": "cpu"})], "set.device belongs to the process"),
        ([entry(set={"train.until": "9it"})], "set.train.until is set by the branch itself"),
        ([entry(set={"train.batch": 9})], "set.train.batch is not a key of the config"),
        ([entry(set={"train.batch_size": -1})], "set is invalid: train.batch_size must be"),
        ([entry(set={"checkpoint.best_of": ["x"]})], "in the branch, checkpoint.best_of[0]: this"),
        ([entry(schedule=[{"value": 3}])], "schedule is invalid: schedule[0].name is missing"),
        ([entry(schedule=[SMALL])], "schedule[0].schedule[0].name must not be branch"),
        (
            [entry(schedule=[{**GROW, "value": -1}])],
            "in the branch, schedule[0].value needs a whole",
        ),
        ([entry(when={"at_step": 14})], "schedule[0] cannot begin: the run ends after 14 steps"),
    ],
)
def test_what_cannot_be_is_refused_before_the_start(
    cfg: Path, schedule: object, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(load_checked(str(cfg), [f"schedule={json.dumps(schedule)}"]), world_size=1)
    assert message in str(caught.value)


def test_a_branch_begins_with_a_whole_checkpoint(cfg: Path) -> None:
    settings = [f"schedule={json.dumps(FAMILY)}", "checkpoint.save_rng_state=false"]
    with pytest.raises(ConfigError, match="save_rng_state is false, and a branch begins"):
        load_checked(str(cfg), settings)


def test_a_branch_is_forecast(cfg: Path) -> None:
    loaded_config = load_checked(str(cfg), [f"schedule={json.dumps(FAMILY)}"])
    prepared_run = preflight(loaded_config, world_size=1)
    small, big = prepared_run.forecast.branches
    assert (small.first_step, small.latest_step, small.iters, small.decay) == (6, 6, 6, 3)
    assert (big.first_step, big.decay) == (10, 4)
    assert big.parameters.total > small.parameters.total
    for branch in (small, big):
        assert branch.early is not None
        assert branch.early == branch.late
        assert branch.early.steps == branch.iters
    # the trunk's steps and FLOPs are those without branches
    trunk_config = prepared_run.config.model_copy(
        update={"schedule": (prepared_run.config.schedule[1],)}
    )
    without = forecast(trunk_config, prepared_run.spec, 1)
    assert without.early == prepared_run.forecast.early
    assert without.stages[1].first_step == prepared_run.forecast.stages[2].first_step
    text = render(prepared_run.forecast)
    assert "small, at step 6: 6 steps" in text
    assert "big, at step 10: 4 steps" in text


def test_branches_beside_a_new_run_must_be_new(cfg: Path, tmp_path: Path) -> None:
    (tmp_path / "trunk.small").mkdir()
    settings = [f"schedule={json.dumps(FAMILY)}", f"record.run_dir={tmp_path / 'trunk'}"]
    with pytest.raises(ConfigError, match=r"the branch's folder .*trunk\.small exists already"):
        preflight(load_checked(str(cfg), settings), world_size=1)


def test_the_trunks_report_is_written_again_also_where_a_branch_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log: Any = SimpleNamespace(path=tmp_path / "trunk" / "logs" / "rank_0.log", rank=0)
    config: Any = SimpleNamespace(config="trunk's")
    branches = iter([[(RunDir(tmp_path / "trunk.small"), config)]])

    def train(*_: object) -> object:
        for branch_runs in branches:
            return branch_runs
        raise RunFailed("the disk is gone")

    reports: list[tuple[RunDir, object]] = []
    monkeypatch.setattr(worker, "_train_and_report", train)
    monkeypatch.setattr(worker, "end_extensions", lambda *run: reports.append(run))
    signal: Any = None
    with pytest.raises(RunFailed, match="the disk is gone"):
        worker.run(config, log, signal)
    assert reports == [(RunDir(tmp_path / "trunk"), "trunk's")]
