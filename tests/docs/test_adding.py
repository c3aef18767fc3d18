"""The changes of docs/adding.md apply to the source, touch few files, and add what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_run import CONFIG, TEXT

ROOT = Path(__file__).parents[2]
SECTION = re.compile(r"^## (.*?)\n.*?^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHANGES = dict(SECTION.findall((ROOT / "docs/adding.md").read_text("utf-8")))
MOST_FILES = 3
TINY = ("--set", "train.until=2it", "--set", "record.run_dir=run")


class Copy:
    """A copy of the source with one change, and a folder to use it in."""

    def __init__(self, root: Path, change: str) -> None:
        self.root = root
        self.folder = root / "folder"
        shutil.copytree(
            ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
        self.folder.mkdir()
        command = ["git", "apply", "--unidiff-zero", "--whitespace=nowarn", "-"]
        subprocess.run(command, cwd=root, input=change, text=True, check=True)

    def python(self, *words: str) -> str:
        paths = os.pathsep.join([str(self.root / "src"), str(self.root)])
        process = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout + process.stderr

    def instar(self, *words: str) -> str:
        return self.python("-m", "instar", *words)

    def architecture(self, run: str) -> dict[str, Any]:
        (manifest,) = (self.folder / run / "checkpoints").glob("step-2/manifest.json")
        architecture: dict[str, Any] = json.loads(manifest.read_text("utf-8"))["architecture"]
        return architecture

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, "utf-8")


@pytest.fixture
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Copy:
    return Copy(tmp_path, CHANGES[request.param])


@pytest.mark.parametrize("title", CHANGES)
def test_a_change_touches_few_files(title: str) -> None:
    files = re.findall(r"^\+\+\+ b/(\S+)$", CHANGES[title], re.MULTILINE)
    assert 1 <= len(set(files)) == len(files) <= MOST_FILES


@pytest.mark.parametrize("title", CHANGES)
def test_a_change_applies(title: str) -> None:
    command = ["git", "apply", "--check", "--unidiff-zero", "-"]
    subprocess.run(command, cwd=ROOT, input=CHANGES[title], text=True, check=True)


def test_there_is_one_of_each() -> None:
    kinds = ["An operation", "A tracker", "A source", "A task", "An engine of fleets"]
    assert list(CHANGES) == kinds


@pytest.mark.parametrize("copy", ["An operation"], indirect=True)
def test_an_operation_grows_a_run(copy: Copy) -> None:
    copy.write("squares.txt", TEXT)
    copy.write("run.yaml", CONFIG + "schedule: [{name: double_layers, max_wait_iters: 1}]\n")
    copy.instar("train", "run.yaml", *TINY)
    assert copy.architecture("run")["n_layer"] == 4


@pytest.mark.torture
@pytest.mark.parametrize("copy", ["A tracker"], indirect=True)
def test_a_tracker_receives_the_steps_of_a_run(copy: Copy) -> None:
    copy.write("squares.txt", TEXT)
    copy.write("run.yaml", CONFIG)
    copy.instar("train", "run.yaml", *TINY, "--set", "record.trackers.tsv={}")
    lines = (copy.folder / "run/losses.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["1", "2"]


@pytest.mark.torture
@pytest.mark.parametrize("copy", ["A source"], indirect=True)
def test_a_source_is_read(copy: Copy) -> None:
    copy.write("rows.psv", "text|number\n" + "".join(f"{n} squared|{n}\n" for n in range(300)))
    copy.write("run.yaml", CONFIG.replace("squares.txt", "rows.psv, kind: rows"))
    copy.instar("train", "run.yaml", *TINY, "--set", "data.tokenizer=byte")


@pytest.mark.torture
@pytest.mark.parametrize("copy", ["A task"], indirect=True)
def test_a_task_is_trained_and_grows(copy: Copy) -> None:
    shutil.move(copy.root / "copies.py", copy.folder)
    copy.write(
        "run.yaml",
        "task: copies:Copies\nrecord: {log_interval: 1, report: false}\n"
        "schedule: [{name: widen, value: {axis: hidden, size: 12}, max_wait_iters: 1}]\n",
    )
    copy.instar("train", "run.yaml", *TINY)
    assert copy.architecture("run")["hidden"] == 12


@pytest.mark.torture
@pytest.mark.parametrize("copy", ["An engine of fleets"], indirect=True)
def test_an_engine_runs_a_fleet(copy: Copy) -> None:
    word = {"command": ["python", "-c", "import time; print(time.time())"]}
    fleet = {"name": "words", "engine": "one_by_one", "matrix": {"n": [1, 2]}, "jobs": {"w": word}}
    copy.write("fleet.yaml", json.dumps(fleet | {"run_name": "word-${n}"}))
    output = copy.instar("fleet", "up", "fleet.yaml")
    assert "2 instances, one by one" in output
