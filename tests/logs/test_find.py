"""Which runs a text means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from written_runs import write_run

from instar.config.errors import ConfigError
from instar.logs.query.bases import notes_on_bases
from instar.logs.query.runs import find_runs
from instar.record.rundir import find_run, runs_in


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs in `runs`, the last of them written to first, and a folder that is none."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("grow-abcde", "grow-fghjk", "other-mnpqr")):
        run = write_run(Path("runs", name), {1: 3.0})
        os.utime(run.events, (1000 - number, 1000 - number))
    Path("runs", "notes").mkdir()
    return Path("runs")


def names(*texts: str) -> list[str]:
    return [run.path.name for run in find_runs(texts)]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ((), ["grow-abcde"]),
        (("latest",), ["grow-abcde"]),
        (("fghjk",), ["grow-fghjk"]),
        (("grow-fghjk",), ["grow-fghjk"]),
        (("runs/grow-fghjk",), ["grow-fghjk"]),
        (("runs/grow-fghjk/events.jsonl",), ["grow-fghjk"]),
        (("runs/grow-fghjk/checkpoints/latest",), ["grow-fghjk"]),
        (("grow",), ["grow-fghjk", "grow-abcde"]),
        (("runs",), ["other-mnpqr", "grow-fghjk", "grow-abcde"]),
        (("runs/*",), ["grow-abcde", "grow-fghjk", "other-mnpqr"]),
        (("grow-*",), ["grow-abcde", "grow-fghjk"]),
        (("runs/grow-*/events.jsonl",), ["grow-abcde", "grow-fghjk"]),
        (("**/run.yaml",), ["grow-abcde", "grow-fghjk", "other-mnpqr"]),
        (("other", "grow-*", "latest"), ["other-mnpqr", "grow-abcde", "grow-fghjk"]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
def test_a_text_means_runs(texts: tuple[str, ...], expected: list[str]) -> None:
    assert names(*texts) == expected


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grwo", "no run 'grwo' in runs; did you mean 'grow'?"),
        ("fghjm", "did you mean 'fghjk'?"),
        ("runs/grow-fghj", "did you mean 'runs/grow-fghjk'?"),
        ("zzz", "the latest of 3 in runs is 'grow-abcde'"),
        ("zzz-*", "no run matches 'zzz-*'"),
        ("runs/notes", "runs/notes is neither a run nor a folder of runs"),
        ("", "no run ''"),
    ],
)
def test_what_means_no_run_is_told(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_runs([text])
    assert message in str(error.value)


def test_without_any_run_it_is_said_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run in runs; start one with instar train"):
        find_runs([])


def test_a_path_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "there" / "runs" / "grow-abcde", {1: 1.0})
    for find in (find_run, lambda text: find_runs([text])):
        for text in ("nowhere/foo", str(tmp_path / "there" / "runs" / "foo")):
            with pytest.raises(ConfigError) as error:
                find(text)
            assert text in str(error.value)
        with pytest.raises(ConfigError, match=r"did you mean .*grow-abcde"):
            find("there/runs/grow-abcd")


def test_a_folder_without_runs_has_none(tmp_path: Path) -> None:
    assert runs_in(tmp_path) == runs_in(tmp_path / "missing") == []


def test_a_folder_named_by_hand_is_its_own_name(tmp_path: Path) -> None:
    assert write_run(tmp_path / "by-hand", {1: 1.0}).name == "by-hand"
    assert write_run(tmp_path / "grow-abcde", {1: 1.0}).name == "grow"


def test_within_its_folder_a_run_is_named_by_a_dot(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs / "grow-fghjk")
    assert names(".") == names("events.jsonl") == ["grow-fghjk"]


def test_runs_on_different_bases_are_told_apart() -> None:
    bases = {name: {"held-out samples": basis} for name, basis in zip("abcd", "1232", strict=True)}
    assert notes_on_bases(bases) == [
        "held-out values of b, d are not comparable with those of a: other held-out samples",
        "held-out values of c are not comparable with those of a: other held-out samples",
    ]
