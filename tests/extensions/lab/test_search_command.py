"""`instar schedule search`, typed in a folder with a corpus and a config."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import figures
import pytest
from forks import Forks

from instar.run.load_config import load_run_config

Instar = Callable[..., subprocess.CompletedProcess[str]]
SEARCH = ("schedule", "search", "deep.yaml", "--steps", "80")
KILLS = ((20, 9), (20, 25), (40, 45), (80, 90), (80, 110))[:: figures.times(2, 1)]
"""in which rung, and after which step's line"""
CONFIG = """\
name: deep
model: {n_layer: 2, n_head: 3, n_embd: 36, context: 16}
data: {source: squares.txt, path: tokens, tokenizer: char}
train: {until: 120it, batch_size: 4}
optimizer: {lr: 0.004}
learning_rate: {shape: wsd, warmup_iters: 4}
eval: {eval_iters: 8}
checkpoint: {every_steps: 7}
record: {sample_tokens: 0, report: false, log_interval: 1}
"""


Fill = Callable[[Path], Path]


def filled(folder: Path, fill: Fill) -> Path:
    fill(folder)
    (folder / "deep.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, forks: Forks, fill: Fill) -> Path:
    """A folder after a search; not to be changed."""
    folder = filled(tmp_path_factory.mktemp("search"), fill)
    done = search(folder, forks)
    out, _ = done.communicate(timeout=300)
    assert done.returncode == 0, out
    (folder / "said.txt").write_text(out)
    return folder


@pytest.fixture
def place(tmp_path: Path, fill: Fill) -> Path:
    return filled(tmp_path, fill)


def search(folder: Path, forks: Forks, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [forks.command, *SEARCH, *more],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def state(folder: Path) -> Mapping[str, Any]:
    return dict(json.loads((folder / "deep.schedule.search.json").read_text()))


def winner(folder: Path) -> Mapping[str, Any]:
    """The trial of the winner at the horizon."""
    last = [trial for trial in state(folder)["trials"] if trial["rung"] == 2]
    return min(last, key=lambda trial: float(trial["loss"]))


def weights(run: Path) -> Mapping[str, bytes]:
    (last,) = [path for path in run.glob("checkpoints/step-*") if path.name == latest(run)]
    return {file.name: file.read_bytes() for file in last.glob("*.safetensors")}


def latest(run: Path) -> str:
    return (run / "checkpoints" / "latest").read_text().strip()


def test_the_best_config_is_that_with_the_schedule(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    schedule = load_run_config("deep.yaml", ["schedule=deep.schedule.yaml"]).config
    best = load_run_config("deep.best.yaml").config
    assert best.schedule == schedule.schedule
    assert best == schedule
    said = (made / "said.txt").read_text()
    assert said.endswith("deep.best.yaml\nnext: instar train deep.best.yaml\n")


def test_all_are_compared_at_equal_flops_and_half_of_them_go_on(made: Path) -> None:
    found = state(made)
    flops = {each["name"]: each["stages"] for each in found["candidates"]}
    final = flops["scratch"][-1]["flops_per_token"]
    trials: dict[int, set[str]] = {0: set(), 1: set(), 2: set()}
    for trial in found["trials"]:
        trials[trial["rung"]].add(trial["candidate"])
        stages = flops[trial["candidate"]]
        ends = [*(stage["share"] for stage in stages[1:]), 1.0]
        shares = [end - stage["share"] for stage, end in zip(stages, ends, strict=True)]
        spent = sum(s["flops_per_token"] * n for s, n in zip(stages, shares, strict=True))
        rung = found["rungs"][trial["rung"]]
        assert spent * trial["steps"] / (final * rung) == pytest.approx(1, abs=0.06)
    assert found["rungs"] == [20, 40, 80]
    assert [len(each) for each in trials.values()] == [1 + 4, 1 + 2, 1 + 1]
    losses = {t["candidate"]: t["loss"] for t in found["trials"] if t["rung"] == 0}
    best = sorted(losses.keys() - {"scratch"}, key=losses.__getitem__)[:2]
    assert trials[1] == {"scratch", *best}
    # what they begin with is trained once: each trial is a branch, and its steps before are the trunk's
    runs = {path.name for path in (made / "runs").iterdir()}
    assert len(runs) == 2 + len(found["trials"])
    for trial in found["trials"]:
        (run,) = (made / "runs").glob(f"*.{trial['candidate']}-{trial['steps']}it")
        assert latest(run) == f"step-{trial['steps']}"


@pytest.mark.torture
def test_the_winner_is_trained_by_its_file_bit_for_bit(
    made: Path, instar: Instar, place: Path
) -> None:
    shutil.copytree(made / "tokens", place / "tokens")
    for file in made.glob("deep.schedule.*"):
        shutil.copy(file, place)
    best = winner(made)
    assert best["candidate"] != "scratch"
    said = (made / "said.txt").read_text()
    assert "deep.schedule.yaml\ndeep.best.yaml\nnext: instar train deep.best.yaml\n" in said
    told = json.loads(
        instar(
            "train", "deep.yaml", "--schedule", "deep.schedule.yaml", "--dry-run", "--json"
        ).stdout
    )
    saving = told["saving"]
    assert saving["source"] == "deep.schedule.pilot.json"
    assert saving["low"] < saving["share"] < saving["high"]
    text = (place / "deep.schedule.yaml").read_text()
    assert f"save {100 * saving['share']:.0f} % of the FLOPs" in text
    assert "model: {n_layer: 1}" in text
    check = ("schedule", "check", "deep.schedule.yaml", "--config", "deep.yaml")
    assert "predicted from deep.schedule.pilot.json" in instar(*check).stdout
    given = (f"train.until=[{best['steps']}it]", "record.run_dir=again")
    words = [word for text in given for word in ("--set", text)]
    instar("train", "deep.yaml", "--schedule", "deep.schedule.yaml", *words)
    (trial,) = (made / "runs").glob(f"*.{best['candidate']}-{best['steps']}it")
    assert weights(place / "again") == weights(trial)
    # and resumed with it, which changes nothing
    instar("resume", "again", "--set", "schedule=deep.schedule.yaml", "--until", "200it")


@pytest.mark.torture
@pytest.mark.repeated
def test_a_search_that_is_killed_goes_on_to_the_same_result(
    made: Path, place: Path, forks: Forks
) -> None:
    lines = ""
    for rung, step in KILLS:
        started, begun = search(place, forks), False
        with started:
            assert started.stdout is not None
            for line in started.stdout:
                lines += line
                begun = begun or f" at {rung} steps of the final size" in line
                if begun and re.match(rf" +{step}  ", line):
                    started.send_signal(signal.SIGKILL if step % 2 else signal.SIGTERM)
                    break
            started.stdout.read()
        assert started.returncode in (-signal.SIGKILL, 75), lines
    done = search(place, forks)
    out, _ = done.communicate(timeout=300)
    assert done.returncode == 0, out
    mine, theirs = state(place), state(made)
    for found in (mine, theirs):
        del found["seconds"]
        del found["evaluations"]
    assert mine == theirs
    names = {path.name for path in (made / "runs").iterdir()}
    assert {path.name for path in (place / "runs").iterdir()} == names
    for name in names:
        assert weights(place / "runs" / name) == weights(made / "runs" / name)
    text = "deep.schedule.yaml"
    assert (place / text).read_text().split("expected")[0] == (made / text).read_text().split(
        "expected"
    )[0]


def test_what_is_complete_is_not_trained_again(made: Path, instar: Instar, place: Path) -> None:
    for name in ("tokens", "runs"):
        shutil.copytree(made / name, place / name)
    for file in made.glob("deep.schedule.*"):
        shutil.copy(file, place)
    again = instar(*SEARCH)
    assert "search: " not in again.stderr
    assert (made / "said.txt").read_text().endswith(again.stdout)
    # nor if its file is lost, since runs of the same settings have the same names
    file = place / "deep.schedule.search.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps(whole | {"trials": whole["trials"][:9]}))
    instar(*SEARCH)
    assert json.loads(file.read_text())["trials"] == whole["trials"]


def test_a_dry_run_prints_the_candidates_and_trains_none(instar: Instar, place: Path) -> None:
    said = instar(*SEARCH, "--dry-run").stdout
    assert "L1-2-at-" in said
    assert "times those of the final size in 120 steps" in said
    assert {path.name for path in place.iterdir()} == {
        "squares.txt",
        "tiny.yaml",
        "deep.yaml",
        "tokens",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--budget", "100it"), "'100it' is no time"),
        (("--budget", "2s"), "give at least"),
        (("--set", "model.n_layer=1"), "leaves nothing to grow"),
        (("--set", "learning_rate.shape=cosine"), "has no stable part"),
        (
            ("--set", "learning_rate.decay_fraction=1.0"),
            "decay_fraction is 1, which leaves no stable",
        ),
        (("--set", "learning_rate.lr_decay_iters=90"), "lr_decay_iters is given"),
        (("--set", "learning_rate.plateau.factor=0.5"), "plateau.factor is given"),
        (("--set", "schedule=[{name: change_lr, value: 2, when: {at_step: 3}}]"), "is change_lr"),
        (("--set", "train.until=10min"), "has no last step"),
        (("--set", "model.from=run"), "run"),
    ],
)
def test_mistakes_are_found_before_any_run(
    instar: Instar, place: Path, options: tuple[str, ...], message: str
) -> None:
    words = SEARCH[:3] if "--budget" in options else SEARCH
    assert message in instar(*words, *options, code=2).stderr
    assert not (place / "runs").exists()
    assert not list(place.glob("deep.schedule.*"))


def test_where_nothing_is_better_no_schedule_is_written(
    made: Path, instar: Instar, place: Path
) -> None:
    shutil.copytree(made / "tokens", place / "tokens")
    whole = dict(state(made))
    for trial in whole["trials"]:
        trial["loss"] -= trial["candidate"] == "scratch"
    (place / "deep.schedule.search.json").write_text(json.dumps(whole))
    said = instar(*SEARCH).stdout
    assert "no schedule is better than the final size from scratch" in said
    assert not (place / "deep.schedule.yaml").exists()
    assert not (place / "deep.schedule.pilot.json").exists()
    told = json.loads(instar(*SEARCH, "--json").stdout)
    assert (told["file"], told["complete"]) == (None, True)


def test_a_search_of_something_else_is_not_gone_on_with(
    made: Path, instar: Instar, place: Path
) -> None:
    shutil.copytree(made / "tokens", place / "tokens")
    file = place / "deep.schedule.search.json"
    shutil.copy(made / file.name, file)
    for option, others in (
        ("optimizer.lr=0.001", "settings of optimizer.lr"),
        ("eval.eval_iters=4", "settings of eval.eval_iters"),
        ("model.n_layer=4", "settings of model.n_layer"),
        ("schedule=[{name: stack_layers, value: 2, when: {at_step: 9}}]", "candidates"),
    ):
        said = instar(*SEARCH, "--set", option, code=2).stderr
        assert f"deep.schedule.search.json: was begun with other {others}" in said
        assert "choose another file with -o" in said
    for text, message in (("{", "is not the file of a search"), ("[]", "is not the file of a")):
        file.write_text(text)
        assert message in instar(*SEARCH, code=2).stderr
    file.unlink()
    (place / "deep.schedule.yaml").write_text("- {name: merge_lora}\n")
    assert "exists, and is not the file of a search" in instar(*SEARCH, code=2).stderr
    assert not (place / "runs").exists()


@pytest.mark.torture
def test_a_preset_names_the_final_shape_and_ranks_share_the_trials(
    instar: Instar, place: Path
) -> None:
    with (place / "deep.yaml").open("a") as file:
        file.write("preset: moult\n")
    given = ("--set", "train.batch_size=2", "--nproc", "2", "-o", "by/preset.yaml")
    said = instar(*SEARCH[:3], "--steps", "80", *given, "--seed", "3", "--json")
    told = json.loads(said.stdout)
    assert told["file"] == "by/preset.yaml"
    assert list(told["losses"]) == ["scratch", *(each for each in told["losses"] if "L1-2" in each)]
    run = ("train", "deep.yaml", "--schedule", "by/preset.yaml")
    shown = json.loads(instar(*run, "--set", "train.batch_size=2", "--dry-run", "--json").stdout)
    assert [stage["architecture"]["n_layer"] for stage in shown["stages"]] == [1, 2]
    assert shown["saving"]["source"] == "by/preset.pilot.json"
