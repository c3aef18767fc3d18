"""Tags, notes and the archive: written by commands, beside the runs and never into them."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from recorded import make_run

from instar.cli.main import main
from instar.config.errors import ConfigError
from instar.logs.query.labels import (
    NONE,
    RunLabels,
    change_labels,
    labels_file,
    labels_of,
    read_labels,
)
from instar.record.rundir import RunDir

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunDir]:
    monkeypatch.chdir(tmp_path)
    return [make_run(Path("runs"), name, steps=3) for name in ("demo-aaaaa", "demo-bbbbb")]


def list_ids(capsys: Capture, *options: str) -> list[str]:
    assert main(["logs", "list", "--json", *options]) == 0
    return sorted(row["id"] for row in json.loads(capsys.readouterr().out))


def test_runs_are_tagged_noted_and_archived(runs: list[RunDir], capsys: Capture) -> None:
    before = {path: path.read_bytes() for path in runs[0].path.rglob("*") if path.is_file()}
    assert main(["logs", "tag", "aaaaa", "--add", "baseline", "-a", "lr=1e-3"]) == 0
    assert main(["logs", "tag", "aaaaa", "-r", "baseline", "-a", "paper"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "runs/demo-aaaaa: lr=1e-3, paper"
    assert main(["logs", "note", "aaaaa", "-m", "the best so far"]) == 0
    assert main(["logs", "archive", "bbbbb"]) == 0
    capsys.readouterr()

    assert labels_of(runs) == [
        RunLabels(("lr=1e-3", "paper"), "the best so far"),
        RunLabels(archived=True),
    ]
    assert list_ids(capsys) == list_ids(capsys, "--tag", "paper") == ["aaaaa"]
    assert list_ids(capsys, "--tag", "none") == []
    assert list_ids(capsys, "--archived") == ["aaaaa", "bbbbb"]
    assert main(["logs", "list"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.endswith("tags")
    assert line.endswith("lr=1e-3 paper")
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.usefixtures("runs")
def test_what_is_taken_back_leaves_nothing() -> None:
    assert main(["logs", "archive", "aaaaa"]) == main(["logs", "archive", "aaaaa", "--undo"]) == 0
    assert main(["logs", "note", "aaaaa", "-m", ""]) == 0
    assert json.loads(labels_file(Path("runs")).read_bytes()) == {"version": 1, "runs": {}}


def test_commands_at_one_time_lose_nothing(runs: list[RunDir]) -> None:
    def add(number: int) -> None:
        change_labels(runs[:1], lambda labels: RunLabels((*labels.tags, f"t{number}")))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(12)))

    (labels,) = labels_of(runs[:1])
    assert sorted(labels.tags) == sorted(f"t{number}" for number in range(12))


@pytest.mark.parametrize("tag", ["", "two words", "a" * 41, "\x1b[31m"])
def test_tags_are_words(runs: list[RunDir], capsys: Capture, tag: str) -> None:
    assert main(["logs", "tag", "aaaaa", "--add", tag]) == 2
    assert "--add" in capsys.readouterr().err
    assert labels_of(runs) == [NONE, NONE]


@pytest.mark.parametrize("content", [b"{", b'{"runs": []}', b'{"runs": {"a": {"tags": 1}}}'])
def test_a_broken_file_is_ignored_when_read_and_kept_when_written(
    runs: list[RunDir], content: bytes
) -> None:
    path = labels_file(Path("runs"))
    path.parent.mkdir()
    path.write_bytes(content)

    assert read_labels(Path("runs")) == {}
    with pytest.raises(ConfigError, match="is not valid"):
        change_labels(runs, lambda _: RunLabels(note="new"))
    assert path.read_bytes() == content


def test_a_note_that_is_no_text_is_refused(runs: list[RunDir]) -> None:
    """A shell passes any bytes."""
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        change_labels(runs, lambda _: RunLabels(note=os.fsdecode(b"caf\xe9")))


def test_nothing_is_written_through_a_link(runs: list[RunDir], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    Path("runs/.instar").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ConfigError, match="symbolic link"):
        change_labels(runs, lambda _: RunLabels(note="new"))
    assert not list((tmp_path / "elsewhere").iterdir())
