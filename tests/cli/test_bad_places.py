"""Folders, names and limits that the system refuses end in a sentence, not in a traceback."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import parametrize_first
from needed import needs, without_deleted
from written_runs import write_run

from instar.config.errors import sentence_of
from instar.distributed.failure import exception_text, out_of_memory

Instar = Callable[..., subprocess.CompletedProcess[str]]
LONG = "x" * 5000
DEEP = "/".join(["xx"] * 1700)
ODD = os.fsdecode(b"odd-\xff\xfe")


def error_output(process: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in process.stderr, process.stderr
    return process.stderr


@pytest.mark.parametrize("path", [LONG, DEEP], ids=["long", "deep"])
@pytest.mark.parametrize(
    "words",
    [
        "train tiny.yaml --set record.run_dir={}",
        "train tiny.yaml --set data.path={}",
        "logs summary {}",
        "checkpoint list {}",
        "sample {}",
        "checkpoint import {} --to new",
    ],
)
def test_a_path_that_no_system_has_is_refused(instar: Instar, words: str, path: str) -> None:
    assert "name too long" in error_output(instar(*words.format(path).split(), code=2))


@pytest.mark.parametrize("key", ["data.path", "record.out_dir", "record.run_dir", "schedule"])
def test_a_nul_in_a_value_is_refused(instar: Instar, key: str) -> None:
    assert (
        "nul"
        in error_output(instar("train", "tiny.yaml", "--set", f'{key}="a\\0b"', code=2)).lower()
    )


@pytest.mark.parametrize("folder", ["/proc/x", "/dev/null/x"])
def test_a_place_where_nothing_can_be_made_is_named(instar: Instar, folder: str) -> None:
    assert folder.rpartition("/")[0] in error_output(
        instar("train", "tiny.yaml", "--set", f"record.run_dir={folder}", code=2)
    )


def run_limited(
    place: Path, words: list[str], limit: Callable[[], None]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "instar.cli.main", *words],
        cwd=place,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=limit,
    )


def small_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10))


@pytest.mark.torture
@pytest.mark.parametrize("limit", [small_files, few_files])
def test_a_full_disk_and_few_open_files_end_in_a_sentence(
    instar: Instar, place: Path, limit: Callable[[], None]
) -> None:
    instar("data", "prepare", "tiny.yaml")
    process = run_limited(place, ["train", "tiny.yaml", "--set", "record.run_dir=run"], limit)
    assert process.returncode in (2, 3, 4)
    assert "File too large" in error_output(process) or "Too many open files" in error_output(
        process
    )


def test_what_the_system_refuses_is_told_with_path_and_hint() -> None:
    assert sentence_of(OSError(28, "No space left on device", "runs/a/x")) == (
        "runs/a/x: No space left on device; free some space"
    )
    assert "ulimit -n" in sentence_of(OSError(24, "Too many open files"))
    assert "\\xff" in sentence_of(OSError(2, "No such file or directory", b"b\xff"))


def test_too_little_memory_is_said_so() -> None:
    error = RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    )
    assert out_of_memory(error)
    assert exception_text(error).startswith("out of memory")
    assert not out_of_memory(RuntimeError("shapes differ"))


@pytest.fixture
def odd(place: Path) -> Path:
    """Two runs, the folder of one of which has a name that is not UTF-8."""
    for name in ("even-aaaaa", ODD):
        write_run(place / "runs" / name, {1: 3.0, 2: 2.0}, {2: 2.5})
    return place


@parametrize_first(
    "words",
    without_deleted(
        [
            "logs list",
            "logs list --json",
            "logs summary runs",
            "logs compare runs",
            "logs plot runs --output curves.svg",
            "report runs --output both.html",
            "logs export runs --to csv --output out",
        ]
    ),
    first=2,
)
def test_a_name_that_is_not_utf8_hides_no_run(
    odd: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (odd / "runs" / ODD).is_dir()
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")
    monkeypatch.setenv("PYTHONUTF8", "1")
    process = subprocess.run(
        [sys.executable, "-m", "instar.cli.main", *words.split()],
        cwd=odd,
        capture_output=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    if "--json" in words:
        names = [row["path"] for row in json.loads(process.stdout)]
        assert any("even" in name for name in names)
        assert any("odd" in name for name in names)


@needs("board")
def test_the_dashboard_lists_all_runs_whatever_one_is_called(odd: Path) -> None:
    from instar.extensions.board import app
    from instar.extensions.board.catalog import Catalog

    catalog = Catalog(odd / "runs", app.catalog_row, app.unread_row)
    catalog.refresh()
    rows, _ = catalog.since(0)
    assert json.dumps(rows).encode()
    for row in rows:
        str(row).encode("utf-8")
    assert sorted(row["key"] for row in rows) == ["even-aaaaa", "odd-\\xff\\xfe"]
    assert all(row["state"] == "finished" for row in rows)
    assert catalog.find("odd-\\xff\\xfe") is not None


@needs("board")
def test_a_run_that_cannot_be_told_leaves_the_others_in_the_list(odd: Path) -> None:
    from instar.extensions.board import app
    from instar.extensions.board.catalog import Catalog

    def look(run: object) -> dict[str, object]:
        if "odd" in str(run):
            raise ValueError("odd")
        return {"state": "finished"}

    catalog = Catalog(odd / "runs", look, app.unread_row)  # type: ignore[arg-type]
    catalog.refresh()
    assert sorted(row["state"] for row in catalog.since(0)[0]) == ["finished", "unread"]
