"""`instar schedule` and `instar train --schedule` as a person types them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Instar = Callable[..., subprocess.CompletedProcess[str]]

GROW = """\
- {name: change_lr, value: 0.5, max_wait_iters: 3}
- {name: widen_mlp, value: x2, when: {at_step: 6}}
"""


@pytest.fixture
def grow(place: Path) -> Path:
    path = place / "grow.yaml"
    path.write_text(GROW)
    return path


def test_a_check_tells_the_stages_and_prepares_nothing(
    instar: Instar, place: Path, grow: Path
) -> None:
    result = instar("schedule", "check", grow.name, "--config", "tiny.yaml")
    for text in ("stage 3     widen_mlp x2 (exact)", "begins      at step 6", "lr 0.001 → 0.0005"):
        assert text in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "epochs are not known" in result.stdout
    assert "no data in tokens yet" in result.stderr
    assert {path.name for path in place.iterdir()} == {"squares.txt", "tiny.yaml", "grow.yaml"}


def test_a_check_knows_epochs_where_data_are_there(instar: Instar, grow: Path) -> None:
    instar("data", "prepare", "tiny.yaml")
    result = instar("schedule", "check", grow.name, "--config", "tiny.yaml", "--json")
    forecast = json.loads(result.stdout)
    assert result.stderr == ""
    assert forecast["early"]["epochs"] > 0
    assert [stage["first_step"] for stage in forecast["stages"]] == [0, 3, 6]
    assert forecast["stages"][2]["architecture"]["n_mlp"] == 256


def test_without_a_config_it_is_the_default_one(instar: Instar, grow: Path) -> None:
    result = instar("schedule", "check", grow.name, "--set", "model.n_embd=64", "--nproc", "2")
    assert "4 layers × 64 wide" in result.stdout
    assert "on 2 ranks" in result.stdout


def test_an_impossible_schedule_is_refused_with_its_line(instar: Instar, grow: Path) -> None:
    grow.write_text(f"{GROW}- {{name: widen_mlp, value: 100, max_wait_iters: 1}}\n")
    for command in (
        ["schedule", "check", "grow.yaml", "--config", "tiny.yaml"],
        ["train", "tiny.yaml", "--schedule", "grow.yaml", "--dry-run"],
        ["train", "tiny.yaml", "--schedule", "grow.yaml"],
    ):
        result = instar(*command, code=2)
        assert "grow.yaml:3:28: schedule[2].value is not possible here: widen_mlp" in result.stderr
        assert "Nothing was started." in result.stderr
        assert result.stdout == ""
    assert not (grow.parent / "runs").exists()


def test_mistakes_are_told_before_data_are_prepared(instar: Instar, grow: Path) -> None:
    grow.write_text("- {name: widen_mpl, value: 100, max_wait_iters: 1}\n")
    result = instar("train", "tiny.yaml", "--schedule", "grow.yaml", code=2)
    assert "did you mean 'widen_mlp'?" in result.stderr
    assert not (grow.parent / "tokens").exists()
    assert "no such file" in instar("schedule", "check", "none.yaml", code=2).stderr


def test_a_dry_run_tells_the_same_as_a_check(instar: Instar, grow: Path) -> None:
    dry = instar("train", "tiny.yaml", "--schedule", grow.name, "--dry-run").stdout
    check = instar("schedule", "check", grow.name, "--config", "tiny.yaml").stdout
    assert dry.startswith(check)
    assert "--set 'schedule=\"grow.yaml\"'" in dry


def test_a_config_may_name_its_schedule(instar: Instar, place: Path, grow: Path) -> None:
    config = place / "tiny.yaml"
    config.write_text(f"{config.read_text()}schedule: {grow.name}\n")
    forecast = json.loads(instar("train", "tiny.yaml", "--dry-run", "--json").stdout)
    assert [stage["operation"] for stage in forecast["stages"]] == [
        "",
        "change_lr 0.5",
        "widen_mlp x2",
    ]
