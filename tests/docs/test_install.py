"""What `pip install .` installs works without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def files(folder: Path) -> set[Path]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path for path in found if "__pycache__" not in path.parts}


def test_an_installation_is_complete_and_has_the_demo(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src/instar", source / "src/instar")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site)]
    alone = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, *alone, str(source)], check=True)
    assert files(site / "instar") == files(ROOT / "src/instar")
    done = subprocess.run(
        [sys.executable, "-m", "instar", "init", "demo"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "wrote demo.yaml   next: instar train demo.yaml\n")
    assert "insert_layers" in (tmp_path / "demo.yaml").read_text()
