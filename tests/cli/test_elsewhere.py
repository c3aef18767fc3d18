"""A run goes on from any folder, and after its folder was moved."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from needed import needs

from instar.api import resume
from instar.record.rundir import RunDir
from instar.record.start_folder import START_FILE, absolute, note_start, paths_folder, read_start

RunCli = Callable[..., str]


@pytest.fixture
def run(run_cli: RunCli, place: Path) -> Path:
    """A run in the folder `project`, which has its data too."""
    project = place / "project"
    project.mkdir()
    for name in ("squares.txt", "tiny.yaml"):
        (place / name).rename(project / name)
    words = ("--set", "record.run_dir=runs/r", "--until", "2it", "--set", "data.path=null")
    run_cli("train", "tiny.yaml", *words, where=project)
    return project / "runs" / "r"


@pytest.mark.torture
def test_a_run_is_resumed_tested_and_analysed_from_another_folder(
    run_cli: RunCli, run: Path, place: Path
) -> None:
    other_dir = place / "elsewhere"
    other_dir.mkdir()
    output = run_cli("resume", run, "--until", "4it", where=other_dir)
    assert f"in {place / 'project'}, where the run was started" in output
    assert "done  4 steps" in output
    run_cli("test", "../project/runs/r", where=other_dir)
    two = ("--nproc", "2", "--until", "6it")
    assert "done  6 steps" in run_cli("resume", "../project/runs/r", *two, where=other_dir)
    run_cli("sample", run, "--tokens", "3", where=other_dir)
    analysis = run_cli("checkpoint", "analyze", run, where=other_dir)
    assert "has no dataset.json" not in analysis
    assert "is not there" not in analysis
    assert not [path for path in other_dir.iterdir() if not path.name.startswith("said-")]


def test_a_run_of_a_mixture_goes_on_from_another_folder(run_cli: RunCli, place: Path) -> None:
    project = place / "project"
    project.mkdir()
    text = (place / "squares.txt").read_text()
    for name in ("a.txt", "b.txt"):
        (project / name).write_text(text)
    (place / "tiny.yaml").rename(project / "tiny.yaml")
    mixture = "[{source: a.txt, weight: 1, name: a}, {source: b.txt, weight: 1, name: b}]"
    words = ("--set", f"data.mixture={mixture}", "--set", "data.source=stdlib")
    words = (*words, "--set", "data.tokenizer=byte")
    words = (*words, "--set", "data.path=null", "--set", "record.run_dir=runs/r", "--until", "2it")
    run_cli("train", "tiny.yaml", *words, where=project)
    assert "done  3 steps" in run_cli("resume", project / "runs" / "r", "--until", "3it")


def test_a_project_that_was_moved_or_copied_goes_on_with_its_own_files(
    run_cli: RunCli, run: Path, place: Path
) -> None:
    shutil.copytree(place / "project", place / "copy")
    output = run_cli("resume", place / "copy" / "runs" / "r", "--until", "3it")
    assert f"in {place / 'copy'}, where the run was started" in output
    (place / "project").rename(place / "moved")
    assert "done  3 steps" in run_cli("resume", "moved/runs/r", "--until", "3it")
    assert run.parent.parent.name == "project"


def test_a_branch_that_was_only_made_is_trained_from_another_folder(
    run_cli: RunCli, run: Path, place: Path
) -> None:
    schedule = "[{name: branch, value: b, when: {at_step: 3}, iters: 2, train: false}]"
    run_cli("resume", run, "--until", "4it", "--set", f"schedule={schedule}")
    assert "done  5 steps" in run_cli("resume", f"{run}.b")
    (place / "project").rename(place / "moved")
    output = run_cli("resume", "moved/runs/r.b", "--until", "6it")
    assert f"in {place / 'moved'}, where the run was started" in output


def test_a_grown_run_goes_on_from_another_folder(run_cli: RunCli, run: Path, place: Path) -> None:
    run_cli("grow", run, "grown", "--op", "widen_mlp=x2", "--check")
    assert "done  3 steps" in run_cli("resume", "grown", "--until", "3it")
    assert not (place / "data").exists()


def test_a_path_that_leads_somewhere_from_the_file_alone_is_told_with_that_folder(
    run_cli: RunCli, run: Path, place: Path
) -> None:
    config = place / "project" / "tiny.yaml"
    for words in (("train", config), ("data", "prepare", config)):
        output = run_cli(*words, code=2)
        assert (
            f"squares.txt is in {place / 'project'}, and relative paths begin in {place}" in output
        )
    assert "no file matches squares.*" in run_cli(
        "train", run / "run.yaml", "--set", "data.source=squares.*", code=2
    )


def test_a_source_of_a_mixture_is_told_with_the_folder_that_has_it(
    run_cli: RunCli, run: Path, place: Path
) -> None:
    del run
    config = place / "project" / "mixed.yaml"
    text = (place / "project" / "tiny.yaml").read_text()
    text = text.replace("source: squares.txt", "mixture: [{source: squares.txt, weight: 1}]")
    config.write_text(text.replace("tokenizer: char", "tokenizer: byte"))
    assert "mixture" in config.read_text()
    for words in (("train", config), ("train", config, "--dry-run")):
        output = run_cli(*words, code=2)
        assert f"squares.txt is in {config.parent}, and relative paths begin in {place}" in output
        assert "mixed.yaml:" in output
    output = run_cli(
        "train", config, "--set", "data.mixture=[{source: nothing.txt, weight: 1}]", code=2
    )
    assert "data.mixture[0].source: there is no file or folder nothing.txt" in output


@needs("lab")
def test_a_finder_reads_a_config_from_another_folder(
    run_cli: RunCli, run: Path, place: Path
) -> None:
    project = place / "project"
    output = run_cli("find", "lr", project / "tiny.yaml", code=2)
    assert f"squares.txt is in {project}, and relative paths begin in {place}" in output
    batch_output = run_cli("find", "batch", run / "run.yaml", "--max", "1", where=project)
    assert "fastest: 1 samples" in batch_output


@pytest.mark.torture
def test_python_resumes_it_from_another_folder_too(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resume(run, ["train.until=3it"]) == run
    assert (run / "checkpoints" / "step-3").is_dir()
    assert Path.cwd() == tmp_path


def test_data_that_were_moved_are_named_once(run_cli: RunCli, run: Path, place: Path) -> None:
    (data,) = (place / "project" / "data").iterdir()
    data.rename(place / "data-elsewhere")
    (place / "project" / "squares.txt").unlink()
    run_cli("resume", run, code=2)
    data_path = ("--set", "data.path=data-elsewhere")
    assert "done  3 steps" in run_cli("resume", run, "--until", "3it", *data_path)
    output = run_cli("resume", run, "--until", "4it")
    assert f"data.path: {place / 'data-elsewhere'}, as given before" in output
    assert "done  4 steps" in output


def test_the_folder_is_the_one_whose_files_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, other_dir = tmp_path / "project", tmp_path / "here"
    run = RunDir(project / "runs" / "r")
    for folder in (run.path, other_dir):
        folder.mkdir(parents=True)
    monkeypatch.chdir(project)
    note_start(run)
    monkeypatch.chdir(other_dir)
    note_start(run)
    start = read_start(run)
    assert start is not None
    assert (start.folder, start.relative) == (str(project), "../..")
    paths = {"data.path": "data/x", "task": "tasks:Mine", "data.source": "/absolute"}
    assert paths_folder(run, paths) == other_dir  # nothing is anywhere
    (project / "tasks.py").touch()
    assert paths_folder(run, paths) == project
    (other_dir / "tasks.py").touch()
    (other_dir / "data" / "x").mkdir(parents=True)
    assert paths_folder(run, paths) == other_dir
    assert (
        paths_folder(run, {"data.path": str(project)}) == other_dir
    )  # absolute paths hold anywhere
    (run.path / START_FILE).write_text("damaged")
    assert paths_folder(run, paths) == other_dir
    assert absolute(("data.path=data/x", "data.path=gone", "train.clip=1")) == (
        f"data.path={other_dir / 'data' / 'x'}",
        "data.path=gone",
        "train.clip=1",
    )


def test_a_row_of_a_mixture_is_named_by_its_file_and_line(run_cli: RunCli, place: Path) -> None:
    (place / "good.jsonl").write_text('{"text": "all is well"}\n' * 200)
    (place / "bad.jsonl").write_text('{"text": "all is well"}\n' * 50 + '{"txt": "oh"}\n')
    mixture = "[{source: good.jsonl, weight: 1}, {source: bad.jsonl, weight: 1}]"
    words = ("--set", f"data.mixture={mixture}", "--set", "data.source=stdlib")
    output = run_cli(
        "train",
        "tiny.yaml",
        *words,
        "--set",
        "data.tokenizer=byte",
        "--set",
        "data.path=null",
        code=2,
    )
    assert "bad.jsonl:51: the field 'text' is missing" in output
