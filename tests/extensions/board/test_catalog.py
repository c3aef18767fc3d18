"""The list of runs: what is looked at, and when."""

from pathlib import Path
from typing import Any

import pytest
from recorded import make_run

from instar.extensions.board import catalog
from instar.extensions.board.app import unread_row
from instar.extensions.board.catalog import Catalog
from instar.record.rundir import RunDir


class Looks:
    """Counts what is looked at."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, run: RunDir) -> dict[str, Any]:
        self.names.append(run.path.name)
        return {"size": run.events.stat().st_size}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "FRESH_S", 0)


def test_only_what_has_changed_is_looked_at_again(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, f"run-aaaa{letter}", steps=2) for letter in "abc"]
    looks = Looks()
    list_runs = Catalog(tmp_path, looks, unread_row)
    for _ in range(3):
        list_runs.refresh()
    assert sorted(looks.names) == [run.path.name for run in runs]
    version = list_runs.version
    with runs[1].events.open("ab") as file:
        file.write(b"more\n")
    list_runs.refresh()
    assert looks.names[3:] == ["run-aaaab"]
    assert [row["key"] for row in list_runs.since(version)[0]] == ["run-aaaab"]


def test_where_there_is_no_time_to_look_at_all_each_has_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "REFRESH_S", -1)
    for letter in "abc":
        make_run(tmp_path, f"run-aaaa{letter}", steps=2)
    looks = Looks()
    list_runs = Catalog(tmp_path, looks, unread_row)
    list_runs.refresh()
    rows, _ = list_runs.since(0)
    assert len(looks.names) == 1
    assert sorted(row.get("state", "") for row in rows) == ["", "unseen", "unseen"]
    for _ in range(2):
        for run in tmp_path.iterdir():
            with RunDir(run).events.open("ab") as file:
                file.write(b"more\n")
        list_runs.refresh()
    assert sorted(looks.names) == ["run-aaaaa", "run-aaaab", "run-aaaac"]


def test_a_folder_that_is_a_run_is_the_only_one(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run-aaaaa", steps=2)
    list_runs = Catalog(run.path, Looks(), unread_row)
    assert list_runs.find("run-aaaaa") == RunDir(run.path.resolve())
    assert list_runs.find("logs") is None
