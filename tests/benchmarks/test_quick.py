"""Every benchmark and the studies that are open run, and what one leaves has the form that readers of results rely on."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cases import parametrize_first
from forks import Forks

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
STUDIES = ROOT / "studies" / "growth"
"""those that are not frozen"""


def result_of(name: str, folder: Path, python: Path) -> dict[str, Any]:
    """What `<name>.py --quick` writes."""
    study = STUDIES / f"{name}.py"
    script = study if study.exists() else BENCHMARKS / f"{name}.py"
    done = subprocess.run(
        [python, script, "--quick", "--results", folder],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": str(python)},
    )
    assert done.returncode == 0, done.stderr
    written: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    for case in written["cases"]:
        assert case["case"] in done.stdout
    return written


@parametrize_first(
    ("name", "barred"),
    [
        ("communication", "closed form / simulation, worst case"),
        ("deltas", "tiny, all cores train: training stands still"),
        ("folders", "instar grow / cp"),
        ("order", "shuffled: build and seek to 90 % of 10⁹"),
        ("delta_size", "applying a delta, 1 % changed"),
        ("pauses", "tiny: verify"),
        ("sharded_saves", "save / raw synced write"),
        ("guards", "a step of two ranks: all-reduces"),
        ("scaling", "tiny, 4×32 tokens per rank: T(2) / 2 T(1), beside"),
        ("slow_link", "1 ms each way: time to target, DiLoCo / DDP"),
        ("startup", "instar --help"),
        ("graphs", "4 graphs per rank: T(2) / 2 T(1), beside"),
        ("operations", "tiny: pause of widen_hidden / step"),
        ("gpu", "tiny: stall of a save / step"),
        ("throughput", "tiny (0.022 M): Instar / bare PyTorch loop"),
        ("precision", "as it is: time with auto / fp32, at most"),
        ("time_to_loss", "time of Instar, preset plain / bare loop"),
        ("finetune", "llama: losses of a step differ by, at most"),
        ("growth", "Muon, 4 × 16, 1: grown, compute"),
        ("reasoning", "all tasks: grown less scratch"),
        ("logs", "one log call"),
    ],
    first=7,
)
@pytest.mark.timeout(600)  # the operations compile several shapes
def test_a_smoke_run_leaves_whole_results(
    name: str, barred: str, tmp_path: Path, forks: Forks
) -> None:
    result = result_of(name, tmp_path, forks.python)
    assert result.keys() == {"name", "date", "seconds", "machine", "versions", "cases"}
    assert result["name"] == name
    assert result["seconds"] > 0
    assert result["machine"]["bf16_units"] in (True, False)
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["load_before"] >= 0
    assert {"instar", "python", "torch"} <= result["versions"].keys()
    for case in result["cases"]:
        assert case.keys() == {"case", "figure", "unit", "spread", "bar", "ok"}
        # differences, which noise may turn around
        assert case["figure"] >= 0 or case["unit"] in ("%", "Δ nats")
        assert case["spread"] >= 0
        assert (case["bar"] is None) == (case["ok"] is None)
    cases = {case["case"]: case for case in result["cases"]}
    assert cases[barred]["ok"] in (True, False)
    if name == "finetune":  # a quick run has as many steps as a whole one
        assert all(case["ok"] for case in result["cases"] if case["unit"] == "nats")


def test_a_smoke_run_keeps_published_figures(forks: Forks) -> None:
    before = {path: path.read_bytes() for path in (BENCHMARKS / "results").glob("*.json")}
    subprocess.run([forks.python, BENCHMARKS / "order.py", "--quick"], check=True)
    assert {p: p.read_bytes() for p in (BENCHMARKS / "results").glob("*.json")} == before


def test_a_missing_contender_is_named(tmp_path: Path, forks: Forks) -> None:
    code = (
        "import sys, runpy\n"
        "sys.modules['lightning'] = None\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "sys.argv = ['throughput.py']\n"
        "runpy.run_path(sys.path[0] + '/throughput.py', run_name='__main__')\n"
    )
    done = subprocess.run(
        [forks.python, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "lightning" in done.stderr
    assert ".[bench]" in done.stderr
