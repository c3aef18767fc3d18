"""The source of a custom task is part of what its evaluations depend on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import science
from tiny_run import Place, events, output_of

from instar.tasks.basis import incomparable
from instar.tasks.sources import task_files

FILES = {
    "task.py": "import json, numpy, helper\nfrom parts import layers\ndef late():\n    import later\nraise SystemExit",
    "helper.py": "from deep.inner import x",
    "parts/__init__.py": "from . import losses",
    "parts/layers.py": "from ..helper import y\nfrom .sub.deepest import z",
    "parts/losses.py": "import task",
    "parts/sub/deepest.py": "",
    "deep/inner.py": "def broken(:",
    "later.py": "",
    "unrelated.py": "",
    "parts/unrelated.py": "",
}


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_files_are_those_that_the_module_imports_from_its_folder(
    working_directory: Path,
) -> None:
    names = {name for name, _ in task_files("task:Task")}
    assert names == {name for name in FILES if "unrelated" not in name}
    assert {"helper.py", "parts/__init__.py", "parts/layers.py"} <= {
        name for name, _ in task_files("parts.layers:Task")
    }
    assert task_files("language") == task_files("json:Task") == task_files("none:Task") == ()
    assert "task" not in sys.modules
    (working_directory / "task.py").write_text("import helper")
    assert {name for name, _ in task_files("task:Task")} == {
        "task.py",
        "helper.py",
        "deep/inner.py",
    }


def test_an_edit_is_told_without_hashes() -> None:
    before, after = {"source of the task": "a", "x": "1"}, {"source of the task": "b", "x": "1"}
    assert incomparable(before, after) == ("the source of the task has changed",)
    assert incomparable(before, before) == ()


def test_a_resume_after_an_edit_begins_anew_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place: Place = science.place(tmp_path)
    task = tmp_path / "edited.py"
    task.write_text("from science import Halves\nfrom scale import BY\n\n\nclass Task(Halves):\n"
                    "    def loss(self, model, batch):\n        return BY * super().loss(model, batch)\n")  # fmt: skip
    (tmp_path / "scale.py").write_text("BY = 1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    run = tmp_path / "run"
    keys = ("task=edited:Task", "eval.eval_interval=2", "early_stopping.rules=[]")
    keys = (*keys, "test.at_end=false", "checkpoint.every_steps=2")
    children = place.train(run, *keys, "train.until=[4it]")
    assert [child.finish() for child in children] == [0], output_of(children)
    children = place.resume(run, "--until", "6it")
    assert [child.finish() for child in children] == [0], output_of(children)
    assert events(run, "begins_anew") == []
    (tmp_path / "scale.py").write_text("BY = 100\n")
    children = place.resume(run, "--until", "8it")
    assert [child.finish() for child in children] == [0], output_of(children)
    (restart,) = events(run, "begins_anew")
    assert restart["reasons"] == ["the source of the task has changed"]
    assert events(run, "run_finished")[-1]["best_step"] == 8
