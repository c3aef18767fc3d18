"""Every task in examples/custom is trained, stopped, resumed and tested, on two ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from forks import INSTAR, Forks, children_as_ranks

FOLDER = Path(__file__).parents[2] / "examples/custom"
SIZES = {
    "digits": {"train": 800, "val": 100, "test": 100},
    "houses": {"train": 700, "val": 100, "test": 100},
    "molecules": {"train": 480, "val": 60, "test": 60},
    "sounds": {"train": 480, "val": 60, "test": 60},
}


def instar(place: Path, forks: Forks, *words: str) -> str:
    """Run a command as two ranks; what they said."""
    children = children_as_ranks(forks, 2, INSTAR, list(words), place=place)
    codes = [child.finish() for child in children]
    told = "\n".join(child.output() for child in children)
    assert codes == [0, 0], told
    return told


def recorded(place: Path, kind: str) -> list[dict[str, Any]]:
    lines = (place / "run/events.jsonl").read_text("utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_every_example_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*SIZES}


@pytest.mark.parametrize("name", SIZES)
def test_an_example_is_trained_stopped_resumed_and_tested(
    name: str, tmp_path: Path, forks: Forks
) -> None:
    for suffix in (".py", ".yaml"):
        shutil.copy(FOLDER / f"{name}{suffix}", tmp_path)
    short = ("--set", "record.run_dir=run", "--set", "record.report=false", "--until", "1ep")
    told = instar(tmp_path, forks, "train", f"{name}.yaml", *short, "--set", "test.at_end=false")
    sizes = ", ".join(f"{split} {size}" for split, size in SIZES[name].items())
    assert f"data  {sizes} samples" in told
    instar(tmp_path, forks, "resume", "run", "--until", "2ep")
    instar(tmp_path, forks, "test", "run", "--from", "latest")
    first, second = recorded(tmp_path, "run_started")
    assert first["splits"] == second["splits"] == SIZES[name]
    steps = -(-SIZES[name]["train"] // 32)
    assert (first["step"], second["step"]) == (0, steps)
    assert [event["step"] for event in recorded(tmp_path, "eval")][-1] == 2 * steps
    losses = [event["loss"] for event in recorded(tmp_path, "train")]
    assert losses[-1] < losses[0]
    result = json.loads((tmp_path / "run/test/result.json").read_text("utf-8"))
    assert result["samples"] == SIZES[name]["test"]
    assert (tmp_path / "run/test/predictions.parquet").exists()
