"""The page of all bars is that of the results, and the history of figures points out what changed."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def report(module: Any) -> ModuleType:
    return module("report")


@pytest.fixture(scope="module")
def history(module: Any) -> ModuleType:
    return module("history")


@pytest.fixture(scope="module")
def summary(module: Any) -> ModuleType:
    return module("summary")


def result(
    figure: float,
    *,
    commit: str = "a" * 40,
    day: str = "2026-01-01",
    spread: float = 0.1,
    bar: str | None = "≤ 4",
    ok: bool | None = True,
    **machine: object,
) -> dict[str, Any]:
    return {
        "name": "speed",
        "date": f"{day}T00:00:00+00:00",
        "seconds": 1.0,
        "machine": {"cpu": "CPU(R) 9", "cores": 2, "bf16_units": True, "load_before": 0.5}
        | machine,
        "versions": {"commit": commit},
        "cases": [
            {"case": "a|b", "figure": figure, "unit": "ms", "spread": spread, "bar": bar, "ok": ok}
        ],
    }


def test_the_page_in_the_repository_is_that_of_the_results(summary: ModuleType) -> None:
    page = summary.PAGE.read_text("utf-8")
    assert page == summary.page(summary.RESULTS), "run: python benchmarks/summary.py"


def test_misses_come_first(summary: ModuleType, tmp_path: Path) -> None:
    for name, ok in (("order", True), ("scaling", False), ("torture-cuts", True)):
        text = json.dumps(result(1.0, ok=ok) | {"name": name})
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "runs.json").write_text(json.dumps({"runs": []}))
    lines = summary.page(tmp_path).splitlines()
    assert "Of all bars, 2 of 3 are met." in lines
    row = "a\\|b | 1 ± 0.1 ms | ≤ 4 | aaaaaaa | 2026-01-01 | CPU 9, 2 cores, bf16 units | 0.5 |"
    miss_line, hit_line = lines.index(f"| scaling | {row}"), lines.index(f"| order | {row}")
    assert lines.index("## Not met") < miss_line < lines.index("## Met: Data") < hit_line
    assert lines[-1] == "| cuts |  |  | 1 of 1 | aaaaaaa | 2026-01-01 |"


def test_results_without_a_date_take_that_of_their_history(
    summary: ModuleType, report: ModuleType, tmp_path: Path
) -> None:
    for commit, day in (("a", "2026-01-01"), ("b", "2026-01-02")):
        report.remember(result(1.0, commit=commit * 40, day=day), tmp_path / report.HISTORY)
    old = result(1.0)
    del old["date"]
    (tmp_path / "speed.json").write_text(json.dumps(old))
    (case,) = summary.cases_with_bars(tmp_path)
    assert case.date == "2026-01-01"


def test_the_last_figures_of_a_commit_are_kept(
    report: ModuleType, history: ModuleType, tmp_path: Path
) -> None:
    for content in (result(1), result(2), result(3, commit="b" * 40), result(4, bf16_units=False)):
        report.remember(content, tmp_path)
    entries = history.read(tmp_path, "speed")
    assert [entry.cases["a|b"].figure for entry in entries] == [2, 3, 4]
    assert history.comparable_entries(entries) == entries[-1:]
    assert history.comparable_entries(entries[:2]) == entries[:2]


@pytest.mark.parametrize(
    ("after", "bar", "verdict"),
    [
        (1.15, "≤ 4", None),
        (1.25, "≤ 4", "+25 %: worse"),
        (1.25, "≥ 4", "+25 %: better"),
        (0.75, "≤ 4", "-25 %: better"),
        (0.75, None, "-25 %: changed"),
    ],
)
def test_a_change_beyond_the_spreads_is_pointed_out(
    report: ModuleType,
    history: ModuleType,
    tmp_path: Path,
    after: float,
    bar: str | None,
    verdict: str | None,
) -> None:
    for figure, commit in ((1.0, "a"), (after, "b")):
        report.remember(result(figure, commit=commit * 40, bar=bar, ok=None), tmp_path)
    entries = history.read(tmp_path, "speed")
    change = history.change(entries, "a|b")
    assert (change and str(change)) == verdict
    assert bool(history.describe("speed", entries, all_cases=False)) == (verdict is not None)
    (line,) = history.describe("speed", entries, all_cases=True)[4:]
    assert line.startswith("a|b   1 ± 0.1")


def test_figures_without_a_spread_differ_by_chance(
    report: ModuleType, history: ModuleType, tmp_path: Path
) -> None:
    for figure, commit in ((100, "a"), (101, "b")):
        report.remember(result(figure, commit=commit * 40, spread=0), tmp_path)
    assert history.change(history.read(tmp_path, "speed"), "a|b") is None


def test_a_damaged_history_is_named(history: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "speed.jsonl").write_text('{"date": 1}\n')
    with pytest.raises(SystemExit, match=r"speed\.jsonl, line 1 is damaged"):
        history.read(tmp_path, "speed")
