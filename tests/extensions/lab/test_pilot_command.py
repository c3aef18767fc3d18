"""`instar schedule pilot`, typed in a folder with a corpus and a config."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import Forks

Instar = Callable[..., subprocess.CompletedProcess[str]]
PILOT = ("schedule", "pilot", "tiny.yaml", "--set", "train.until=[400it]")
GROW = "[{name: stack_layers, value: 2, when: {at_fraction: 0.5}}]"


@pytest.fixture
def growing_place(place: Path) -> Path:
    with (place / "tiny.yaml").open("a") as file:
        file.write(f"schedule: {GROW}\n")
    text = (place / "tiny.yaml").read_text()
    (place / "tiny.yaml").write_text(text.replace("{warmup", "{shape: wsd, warmup"))
    return place


def test_a_pilot_predicts_what_is_saved_and_goes_on(instar: Instar, growing_place: Path) -> None:
    result = instar(*PILOT, "--steps", "40")
    assert "grown-40-at-20-s1337" in result.stdout
    assert "trigger     when: {slope_below: {window: 5, curve: {floor: " in result.stdout
    runs = {run["name"] for run in json.loads(instar("logs", "list", "--json").stdout)}
    assert {re.sub(r"tiny-pilot-\w{6}-", "", name) for name in runs} == {
        "final-20-s1337",
        "final-40-s1337",
        "grown-40-at-20-s1337",
        "small-50-s1337",
    }
    file = growing_place / "tiny.pilot.json"
    pilot = json.loads(file.read_text())
    assert 0.3 < pilot["found"]["cost"] < 0.7
    assert pilot["final"]["parameters"] > pilot["small"]["parameters"]

    # the config's forecast has it from now on, also of other schedules
    forecast = json.loads(
        instar("train", "tiny.yaml", "--set", "train.until=[400it]", "--dry-run", "--json").stdout
    )
    saving = forecast["saving"]
    assert saving["low"] < saving["share"] < saving["high"]
    assert "grows after 12.8k tokens, 10 times as many" in saving["extrapolates"][0]
    (growing_place / "late.yaml").write_text(GROW.replace("0.5", "0.8"))
    late = instar("schedule", "check", "late.yaml", "--config", "tiny.yaml", "--set", PILOT[-1])
    assert "of the FLOPs (" in late.stdout
    assert "80 % of the tokens come" in late.stdout.replace("\n            ", " ")
    assert max(map(len, late.stdout.splitlines())) <= 80

    # what is missing is run, and nothing else
    missing_run = pilot["runs"].pop()
    file.write_text(json.dumps(pilot))
    second_result = instar(*PILOT, "--steps", "40")
    assert second_result.stderr.count("pilot: ") == 1
    assert "pilot: small-50-s1337, run 4 of 4" in second_result.stderr
    assert json.loads(file.read_text())["runs"][-1]["loss"] == missing_run["loss"]

    # of another model nothing is predicted
    wide = ("--set", "model.n_embd=64", "--set", "train.until=[400it]")
    assert "predicted from" not in instar("train", "tiny.yaml", *wide, "--dry-run").stdout
    check = ("schedule", "check", "late.yaml", "--config", "tiny.yaml", *wide)
    refusal = instar(*check, "--pilot", "tiny.pilot.json", code=2)
    assert "tiny.pilot.json: predicts nothing here: its model ends with" in refusal.stderr
    # with another rate something is, with a word of caution
    fast = instar(*check[:5], "--set", PILOT[-1], "--set", "optimizer.lr=0.01")
    assert "other settings of optimizer.lr" in fast.stdout.replace("\n            ", " ")


@pytest.mark.torture
def test_a_schedule_that_a_preset_made_is_measured(instar: Instar, place: Path) -> None:
    with (place / "tiny.yaml").open("a") as file:
        file.write("preset: family\n")
    dry = ("train", "tiny.yaml", "--set", "train.until=[400it]", "--dry-run", "--json")
    before = json.loads(instar(*dry).stdout)
    assert before["saving"] is None
    assert "tokens per parameter" in before["typical_saving"]["unknown"]
    result = instar(*PILOT, "--steps", "40")
    assert "with its branches" in result.stdout
    runs = {run["name"] for run in json.loads(instar("logs", "list", "--json").stdout)}
    assert any(name.endswith("-grown-40-at-28-s1337") for name in runs)
    pilot = json.loads((place / "tiny.pilot.json").read_text())
    assert pilot["final"]["parameters"] > pilot["small"]["parameters"]
    after = json.loads(instar(*dry).stdout)
    assert after["typical_saving"] is None
    assert after["saving"]["low"] < after["saving"]["share"] < after["saving"]["high"]
    low, middle, high = after["saving"]["family"]
    assert low < middle < high
    assert "other settings" not in str(after["saving"]["extrapolates"])


def test_ctrl_c_leaves_a_run_that_the_same_command_goes_on_with(
    growing_place: Path, forks: Forks
) -> None:
    process = subprocess.Popen(
        [forks.command, *PILOT, "--steps", "400", "--set", "record.log_interval=1"],
        cwd=growing_place,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            if re.match(r" +9  ", line):  # its ninth step
                process.send_signal(signal.SIGINT)
                break
        output = process.stderr.read()
    assert process.returncode == 75
    assert "the same command goes on with it" in output
    (run,) = (growing_place / "runs").iterdir()
    assert list((run / "checkpoints").glob("step-*"))
    assert json.loads((growing_place / "tiny.pilot.json").read_text())["runs"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "Write e.g. --budget 30min"),
        (("--budget", "100it"), "'100it' is no time"),
        (("--budget", "2s"), "give at least"),
        (("--budget", "2h", "--set", "train.until=30it"), "30 steps, and a pilot needs 40"),
        (("--steps", "40", "--set", "schedule=[]"), "schedule grows no model"),
        (("--steps", "40", "--set", "model.from=run"), "run"),
    ],
)
def test_mistakes_are_found_before_any_run(
    instar: Instar, growing_place: Path, options: tuple[str, ...], message: str
) -> None:
    assert message in instar(*PILOT, *options, code=2).stderr
    assert not (growing_place / "runs").exists()
    assert not (growing_place / "tiny.pilot.json").exists()
