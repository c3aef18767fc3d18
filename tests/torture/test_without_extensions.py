"""The core's own tests pass on a copy of the package in which all extensions are deleted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import figures
from forks import WARM_PYTHON

import instar
from instar.extensions import BUILT_IN

TESTS = Path(__file__).parents[1]
BESIDE = {"benchmarks", "clients", "docs", "examples", "extensions", "gpu", "support", "torture"}
"""folders of tests of more than the core"""
SHORT = ("config/test_fields.py", "logs/test_family.py", "schedule/test_operations.py")


def rooms() -> list[str]:
    """Return the folders of the core's tests."""
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    return sorted(folders - BESIDE)


def test_the_cores_tests_pass_without_extensions(tmp_path: Path) -> None:
    package = tmp_path / "instar"
    ignore = shutil.ignore_patterns("__pycache__", *BUILT_IN)
    source = Path(instar.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(package / "extensions")
    shutil.copytree(source / "extensions", package / "extensions", ignore=ignore)
    files = [str(TESTS / name) for name in (rooms() if figures.FULL else SHORT)]
    marks = "not torture and not hosts and not gpu"
    options = ["-q", "-rfEs", "-p", "no:cacheprovider", "-m", marks, *files]
    workers = ["-n", "2", "--dist", "loadfile"] if figures.FULL else []
    # a worker of `pytest -n` would hand down what its commands are forked from: a process that has imported the extensions
    env = {name: value for name, value in os.environ.items() if name != WARM_PYTHON}
    env |= {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "INSTAR_TORTURE": ""}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *workers],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        cwd=TESTS.parent,
    )
    assert result.returncode == 0, result.stdout.partition("FAILURES")[2] or result.stdout
    skips = re.findall(r"^SKIPPED .*", result.stdout, re.MULTILINE)
    print(len(skips), "left out")
    assert all("without the extension" in line for line in skips if "/support/" not in line)
