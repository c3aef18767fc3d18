"""The runner: what fails keeps nothing else from running, and nothing is left out of both lists."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from forks import Forks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return importlib.import_module("run")


def run_benchmarks(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCHMARKS / "run.py", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_benchmark_has_its_place(runner: ModuleType) -> None:
    scripts = {
        path.stem for path in BENCHMARKS.glob("*.py") if "publish(" in path.read_text("utf-8")
    }
    scripts |= {"sharded_saves"}  # which imports it under another name
    scripts -= {"report"}
    names = [*(benchmark.name for benchmark in runner.SUITE), *runner.BY_NAME, *runner.ELSEWHERE]
    assert sorted(names) == sorted(scripts)


def test_the_suite_fits_into_half_an_hour(runner: ModuleType) -> None:
    assert sum(benchmark.budget_s for benchmark in runner.SUITE) <= 30 * 60


def test_the_list_of_benchmarks_names_all_scripts(runner: ModuleType) -> None:
    names = [*(benchmark.name for benchmark in runner.SUITE), *runner.BY_NAME, *runner.ELSEWHERE]
    page = (BENCHMARKS / "README.md").read_text("utf-8")
    assert [name for name in names if f"| `{name}.py` |" not in page] == []


def test_what_would_not_end_in_time_is_left_out(runner: ModuleType) -> None:
    # on a machine half as fast
    outcomes = [runner.Outcome(runner.Benchmark("order", 10), 20.0, "")]
    assert runner.fits(runner.Benchmark("next", 40), outcomes, 100)
    assert not runner.fits(runner.Benchmark("next", 41), outcomes, 100)
    quick = [runner.Outcome(runner.Benchmark("order", 10), 5.0, "")]
    assert runner.fits(runner.Benchmark("next", 95), quick, 100)
    assert not runner.fits(runner.Benchmark("next", 101), [], 100)


def test_a_suite_without_time_names_what_it_leaves_out(tmp_path: Path) -> None:
    process = run_benchmarks("--within", "0.1", "--results", tmp_path)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "communication.json").exists()
    last_line = process.stdout.splitlines()[-1]
    assert last_line.startswith("left out, for they would not end within 0.1 minutes")
    assert "run.py" in last_line
    assert last_line.endswith("time_to_loss scaling slow_link loading")


@pytest.mark.parametrize(
    "name", ["throughput", "scaling", "graphs", "loading", "time_to_loss", "dashboard"]
)
def test_the_options_of_the_suite_exist(runner: ModuleType, forks: Forks, name: str) -> None:
    """In processes that have imported everything, which else is all that they would do."""
    (benchmark,) = runner.select_benchmarks([name])
    process = subprocess.run(
        [forks.python, BENCHMARKS / f"{name}.py", *benchmark.options, "--help"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="the benchmark of GPUs would run")
def test_a_benchmark_that_fails_is_named_and_the_others_run(tmp_path: Path) -> None:
    process = run_benchmarks("gpu", "communication", "--results", tmp_path)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == "failed: gpu (exit code 1)"
    assert json.loads((tmp_path / "communication.json").read_text())["seconds"] > 0
    lines = {line.split()[0]: line.split() for line in process.stdout.splitlines() if line}
    assert lines["gpu"][2:] == ["failed:", "exit", "code", "1"]
    assert lines["communication"][2:] == ["5", "1", "of", "1"]


def test_one_that_takes_too_long_is_ended(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "SLACK_S", 0)
    monkeypatch.setattr(runner, "LIMIT", 0.01)
    outcome = runner.run(runner.Benchmark("order", 10), [])
    assert outcome.failure == "ended after 0.1 s"
    assert outcome.seconds < 60
    assert "case" not in capfd.readouterr().out


def test_an_unknown_benchmark_is_refused(runner: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no such benchmark: nope; there are communication"):
        runner.select_benchmarks(["order", "nope"])
