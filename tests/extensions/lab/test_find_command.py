"""`instar find`, typed in a folder with a corpus and a config."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from instar.config.load import load_config

Instar = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.torture
def test_the_rate_that_is_printed_can_be_put_into_the_config(instar: Instar, place: Path) -> None:
    result = instar("find", "lr", "tiny.yaml", "--steps", "8", "-o", "rates.png")
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("optimizer.lr: ")]
    assert "8 steps" in result.stdout.splitlines()[0]
    assert (place / "rates.png").read_bytes().startswith(b"\x89PNG")
    assert not (place / "runs").exists()
    key, value = line.split(": ")
    set_to = load_config(str(place / "tiny.yaml"), [f"{key}={value}"]).config.optimizer.lr
    report = json.loads(instar("find", "lr", "tiny.yaml", "--steps", "8", "--json").stdout)
    assert report["settings"] == {"optimizer.lr": set_to}
    assert {run["steps"] for run in report["runs"]} == {2, 4, 8}


def test_the_config_with_the_rate_is_a_file_that_can_be_trained(
    instar: Instar, place: Path
) -> None:
    sets = ("--set", "model.n_embd=16", "--set", "train.until=40it")
    result = instar("find", "lr", "tiny.yaml", "--steps", "8", *sets)
    assert result.stdout.endswith("tiny.lr.yaml\nnext: instar train tiny.lr.yaml\n")
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("optimizer.lr: ")]
    config = load_config(str(place / "tiny.lr.yaml")).config
    rate = float(line.split(": ")[1])
    settings = [*sets[1::2], f"optimizer.lr={config.optimizer.lr}"]
    assert config == load_config(str(place / "tiny.yaml"), settings).config
    assert config.optimizer.lr == float(f"{rate:.4g}")
    instar("train", "tiny.lr.yaml", "--until", "1it")
    # its own file is written again, another is not, and nothing is trained before that is said
    report = json.loads(instar("find", "lr", "tiny.yaml", "--steps", "8", "--json").stdout)
    assert report["config"] == "tiny.lr.yaml"
    assert load_config(str(place / "tiny.lr.yaml")).config.train.until == ("8it",)
    (place / "tiny.lr.yaml").write_text("name: mine\n")
    refusal = instar("find", "lr", "tiny.yaml", "--steps", "8", code=2)
    assert "tiny.lr.yaml: exists, and is not replaced" in refusal.stderr
    assert "steps" not in refusal.stdout
    assert (place / "tiny.lr.yaml").read_text() == "name: mine\n"


def test_mistakes_are_found_before_any_training(instar: Instar) -> None:
    assert (
        "unknown kind of picture" in instar("find", "lr", "tiny.yaml", "-o", "a.gif", code=2).stderr
    )
    refusal = instar("find", "lr", "tiny.yaml", "--steps", "8", "--budget", "1", code=2)
    assert "--budget" in refusal.stderr
    refusal = instar("find", "lr", "tiny.yaml", "--steps", "8", "-o", "none/a.png", code=2)
    assert "no such folder: none" in refusal.stderr
    assert "loss" not in refusal.stderr


def test_a_micro_batch_is_proposed_that_keeps_the_global_batch(instar: Instar, place: Path) -> None:
    argv = (
        "find",
        "batch",
        "tiny.yaml",
        "--max",
        "4",
        "--set",
        "train.gradient_accumulation_steps=3",
    )
    report = json.loads(instar(*argv, "--json").stdout)
    assert [trial["batch_size"] for trial in report["tried"]] == [1, 2, 4]
    assert all(trial["per_s"] > 0 and trial["memory_bytes"] > 0 for trial in report["tried"])
    settings = report["settings"]
    assert settings["train.batch_size"] * settings["train.gradient_accumulation_steps"] == 12
    assert settings["train.batch_size"] <= report["fastest"] <= report["largest"] == 4
    assert not (place / "runs").exists()


def test_the_doctor_says_what_a_machine_has_and_what_to_change(instar: Instar, place: Path) -> None:
    report = json.loads(instar("doctor", "--quick", "--json").stdout)
    checks = {check["what"]: check for check in report["checks"]}
    assert {"devices", "host's name", "CPU cores", "open files", "disk of runs"} <= set(checks)
    assert report["settings"]["parallel.backend"] == "none"
    # the tests' processor has no bf16 units, see conftest.py
    assert report["settings"]["precision"] == "fp32"
    assert checks["fast matrix units for"]["found"] == "float32 only"
    assert not (place / "runs").exists()
    text = instar("doctor", "--quick").stdout
    assert all(what in text for what in checks)
    assert "Instar would train with" in text
