"""How many files one has to read to follow what happens: those on the call stacks, from where it begins."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import noted_ways
import pytest
import states
from forks import forks
from tiny_run import CONFIG, TEXT

BEGINS = frozenset({"run/trainer.py", "cli/main.py", "cli/train.py", "train.py"})
"""where one begins to read: the loop of a run, and what is typed"""
GROWS = "schedule=[{name: widen_mlp, value: x2, when: {at_step: 1}}]"


def note_files(folder: Path, *words: str, **environment: str) -> Mapping[str, list[str]]:
    """Type `instar train` in a folder, and return the files on the way to each thing that was noted."""
    notes = folder / "notes"
    notes.mkdir()
    (folder / "squares.txt").write_text(TEXT)
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "own.yaml").write_text(states.CONFIG.replace("states:States", "noted_ways:Task"))
    support = str(Path(noted_ways.__file__).parent)
    env = os.environ | environment | {noted_ways.FOLDER: str(notes), "PYTHONPATH": support}
    command = [forks().python, noted_ways.__file__, "train", *words, "--set", "record.run_dir=run"]
    subprocess.run(command, cwd=folder, env=env, check=False, capture_output=True, timeout=300)
    return {path.stem: json.loads(path.read_text()) for path in sorted(notes.iterdir())}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[str]]:
    words = ("run.yaml", "--until", "3it", "--set", GROWS)
    return note_files(tmp_path_factory.mktemp("one"), *words)


def way(title: str, stacks: Iterable[list[str]], without: Iterable[str] = BEGINS) -> list[str]:
    """Return the files of several call stacks in the order in which they come, from the loop on if it is there."""
    files: dict[str, None] = {}
    for stack in stacks:
        loop = "run/trainer.py"
        files |= dict.fromkeys(stack[stack.index(loop) :] if loop in stack else stack)
    names = [file for file in files if file not in without]
    print(f"{title}: {len(names)} files\n  " + "\n  ".join(names))
    return names


def test_a_learning_rate(one_rank: Mapping[str, list[str]]) -> None:
    stacks = (one_rank["rate-launcher"], one_rank["rate set-launcher"])
    assert len(way("learning rate", stacks)) <= 3


def test_a_sample(one_rank: Mapping[str, list[str]]) -> None:
    stacks = (one_rank["sample read-launcher"], one_rank["sample used-launcher"])
    files = way("sample", stacks)
    assert files[:2] == ["data/loader.py", "data/source.py"]
    assert len(files) <= 6


def test_a_saved_tensor(one_rank: Mapping[str, list[str]]) -> None:
    stacks = (one_rank["save-launcher"], one_rank["tensors written-launcher"])
    files = way("saved tensor", stacks)
    assert files[-1] == "checkpoint/tensor_file.py"
    assert len(files) <= 6


def test_widen_mlp_from_yaml_to_weights(one_rank: Mapping[str, list[str]]) -> None:
    stacks = (one_rank["entry read-launcher"], one_rank["tensor grown-launcher"])
    files = way("widen_mlp", stacks)
    assert files[-1] == "growth/apply.py"
    rooms = {file.partition("/")[0] for file in files}
    print("rooms:", *sorted(rooms))
    assert len(rooms) <= 8


def test_two_ranks_to_their_first_step(tmp_path: Path) -> None:
    notes = note_files(tmp_path, "own.yaml", "--nproc", "2", "--until", "2it")
    # the loop is on this way too
    stacks = [["cli/main.py", *notes[name]] for name in ("rank started-launcher", "step-1")]
    all_files = list(dict.fromkeys(file for stack in stacks for file in stack))
    print("train --nproc 2:", len(all_files), *all_files)
    assert notes["step-0"] == notes["step-1"]
    assert len(all_files) <= 10


def test_a_failure_on_rank_1(tmp_path: Path) -> None:
    words = ("own.yaml", "--nproc", "2", "--until", "2it")
    notes = note_files(tmp_path, *words, **{noted_ways.FAILS: "1"})
    files = way("failure on rank 1", (notes["failure-1"], notes["failure read-launcher"]))
    assert len(files) <= 6
