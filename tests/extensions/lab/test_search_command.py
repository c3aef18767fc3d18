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

from instar.cli.main import main
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


def prepare_folder(folder: Path, fill: Fill) -> Path:
    fill(folder)
    (folder / "deep.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def search_folder(tmp_path_factory: pytest.TempPathFactory, forks: Forks, fill: Fill) -> Path:
    """A folder after a search; not to be changed."""
    folder = prepare_folder(tmp_path_factory.mktemp("search"), fill)
    process = search(folder, forks)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    (folder / "said.txt").write_text(out)
    return folder


@pytest.fixture
def place(tmp_path: Path, fill: Fill) -> Path:
    return prepare_folder(tmp_path, fill)


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
    search_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(search_folder)
    schedule = load_run_config("deep.yaml", ["schedule=deep.schedule.yaml"]).config
    best = load_run_config("deep.best.yaml").config
    assert best.schedule == schedule.schedule
    assert best == schedule
    output = (search_folder / "said.txt").read_text()
    assert output.endswith("deep.best.yaml\nnext: instar train deep.best.yaml\n")
    assert main(["train", "deep.best.yaml", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["saving"]["source"] == "deep.best.pilot.json"


def test_all_are_compared_at_equal_flops_and_half_of_them_go_on(search_folder: Path) -> None:
    content = state(search_folder)
    flops = {candidate["name"]: candidate["stages"] for candidate in content["candidates"]}
    final = flops["scratch"][-1]["flops_per_token"]
    trials: dict[int, set[str]] = {0: set(), 1: set(), 2: set()}
    for trial in content["trials"]:
        trials[trial["rung"]].add(trial["candidate"])
        stages = flops[trial["candidate"]]
        ends = [*(stage["share"] for stage in stages[1:]), 1.0]
        shares = [end - stage["share"] for stage, end in zip(stages, ends, strict=True)]
        cost = sum(s["flops_per_token"] * n for s, n in zip(stages, shares, strict=True))
        rung = content["rungs"][trial["rung"]]
        assert cost * trial["steps"] / (final * rung) == pytest.approx(1, abs=0.06)
    assert content["rungs"] == [20, 40, 80]
    assert [len(names) for names in trials.values()] == [1 + 4, 1 + 2, 1 + 1]
    losses = {t["candidate"]: t["loss"] for t in content["trials"] if t["rung"] == 0}
    best = sorted(losses.keys() - {"scratch"}, key=losses.__getitem__)[:2]
    assert trials[1] == {"scratch", *best}
    # what they begin with is trained once: each trial is a branch, and its steps before are the trunk's
    runs = {path.name for path in (search_folder / "runs").iterdir()}
    assert len(runs) == 2 + len(content["trials"])
    for trial in content["trials"]:
        (run,) = (search_folder / "runs").glob(f"*.{trial['candidate']}-{trial['steps']}it")
        assert latest(run) == f"step-{trial['steps']}"


@pytest.mark.torture
def test_the_winner_is_trained_by_its_file_bit_for_bit(
    search_folder: Path, instar: Instar, place: Path
) -> None:
    shutil.copytree(search_folder / "tokens", place / "tokens")
    for file in search_folder.glob("deep.schedule.*"):
        shutil.copy(file, place)
    best = winner(search_folder)
    assert best["candidate"] != "scratch"
    output = (search_folder / "said.txt").read_text()
    assert "deep.schedule.yaml\ndeep.best.yaml\nnext: instar train deep.best.yaml\n" in output
    report = json.loads(
        instar(
            "train", "deep.yaml", "--schedule", "deep.schedule.yaml", "--dry-run", "--json"
        ).stdout
    )
    saving = report["saving"]
    assert saving["source"] == "deep.schedule.pilot.json"
    assert saving["low"] < saving["share"] < saving["high"]
    text = (place / "deep.schedule.yaml").read_text()
    assert f"save {100 * saving['share']:.0f} % of the FLOPs" in text
    assert "model: {n_layer: 1}" in text
    check = ("schedule", "check", "deep.schedule.yaml", "--config", "deep.yaml")
    assert "predicted from deep.schedule.pilot.json" in instar(*check).stdout
    settings = (f"train.until=[{best['steps']}it]", "record.run_dir=again")
    words = [word for text in settings for word in ("--set", text)]
    instar("train", "deep.yaml", "--schedule", "deep.schedule.yaml", *words)
    (trial,) = (search_folder / "runs").glob(f"*.{best['candidate']}-{best['steps']}it")
    assert weights(place / "again") == weights(trial)
    # and resumed with it, which changes nothing
    instar("resume", "again", "--set", "schedule=deep.schedule.yaml", "--until", "200it")


@pytest.mark.torture
@pytest.mark.repeated
def test_a_search_that_is_killed_goes_on_to_the_same_result(
    search_folder: Path, place: Path, forks: Forks
) -> None:
    lines = ""
    for rung, step in KILLS:
        process, in_rung = search(place, forks), False
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                lines += line
                in_rung = in_rung or f" at {rung} steps of the final size" in line
                if in_rung and re.match(rf" +{step}  ", line):
                    process.send_signal(signal.SIGKILL if step % 2 else signal.SIGTERM)
                    break
            process.stdout.read()
        assert process.returncode in (-signal.SIGKILL, 75), lines
    last_process = search(place, forks)
    out, _ = last_process.communicate(timeout=300)
    assert last_process.returncode == 0, out
    actual, expected = state(place), state(search_folder)
    for content in (actual, expected):
        del content["seconds"]
        del content["evaluations"]
    assert actual == expected
    names = {path.name for path in (search_folder / "runs").iterdir()}
    assert {path.name for path in (place / "runs").iterdir()} == names
    for name in names:
        assert weights(place / "runs" / name) == weights(search_folder / "runs" / name)
    text = "deep.schedule.yaml"
    assert (place / text).read_text().split("expected")[0] == (
        search_folder / text
    ).read_text().split("expected")[0]


def test_what_is_complete_is_not_trained_again(
    search_folder: Path, instar: Instar, place: Path
) -> None:
    for name in ("tokens", "runs"):
        shutil.copytree(search_folder / name, place / name)
    for file in search_folder.glob("deep.schedule.*"):
        shutil.copy(file, place)
    result = instar(*SEARCH)
    assert "search: " not in result.stderr
    assert (search_folder / "said.txt").read_text().endswith(result.stdout)
    # nor if its file is lost, since runs of the same settings have the same names
    file = place / "deep.schedule.search.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"trials": content["trials"][:9]}))
    instar(*SEARCH)
    assert json.loads(file.read_text())["trials"] == content["trials"]


def test_a_dry_run_prints_the_candidates_and_trains_none(instar: Instar, place: Path) -> None:
    output = instar(*SEARCH, "--dry-run").stdout
    assert "L1-2-at-" in output
    assert "times those of the final size in 120 steps" in output
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
        (("--budget", "2h", "--set", "train.until=60it"), "60 steps, and a search needs 80"),
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
    search_folder: Path, instar: Instar, place: Path
) -> None:
    shutil.copytree(search_folder / "tokens", place / "tokens")
    content = dict(state(search_folder))
    for trial in content["trials"]:
        trial["loss"] -= trial["candidate"] == "scratch"
    (place / "deep.schedule.search.json").write_text(json.dumps(content))
    output = instar(*SEARCH).stdout
    assert "no schedule is better than the final size from scratch" in output
    assert not (place / "deep.schedule.yaml").exists()
    assert not (place / "deep.schedule.pilot.json").exists()
    report = json.loads(instar(*SEARCH, "--json").stdout)
    assert (report["file"], report["complete"]) == (None, True)


@pytest.mark.torture
def test_a_search_of_something_else_is_not_gone_on_with(
    search_folder: Path, instar: Instar, place: Path
) -> None:
    shutil.copytree(search_folder / "tokens", place / "tokens")
    file = place / "deep.schedule.search.json"
    shutil.copy(search_folder / file.name, file)
    for option, difference in (
        ("optimizer.lr=0.001", "settings of optimizer.lr"),
        ("eval.eval_iters=4", "settings of eval.eval_iters"),
        ("train.until=300it", "settings of train.until"),
        ("model.n_layer=4", "settings of model.n_layer"),
        ("schedule=[{name: stack_layers, value: 2, when: {at_step: 9}}]", "candidates"),
    ):
        output = instar(*SEARCH, "--set", option, code=2).stderr
        assert f"deep.schedule.search.json: was begun with other {difference}" in output
        assert "choose another file with -o" in output
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
    options = ("--set", "train.batch_size=2", "--nproc", "2", "-o", "by/preset.yaml")
    result = instar(*SEARCH[:3], "--steps", "80", *options, "--seed", "3", "--json")
    report = json.loads(result.stdout)
    assert report["file"] == "by/preset.yaml"
    assert list(report["losses"]) == [
        "scratch",
        *(name for name in report["losses"] if "L1-2" in name),
    ]
    run = ("train", "deep.yaml", "--schedule", "by/preset.yaml")
    forecast = json.loads(instar(*run, "--set", "train.batch_size=2", "--dry-run", "--json").stdout)
    assert [stage["architecture"]["n_layer"] for stage in forecast["stages"]] == [1, 2]
    assert forecast["saving"]["source"] == "by/preset.pilot.json"
