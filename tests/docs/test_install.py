"""What `pip install .` installs works without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parents[2]


def files(folder: Path) -> set[Path]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path for path in paths if "__pycache__" not in path.parts}


def sources(folder: Path) -> Path:
    """What is needed to build the package."""
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src/instar", folder / "src/instar")
    return folder


def test_wheel_and_sdist_say_who_and_what_and_have_the_changelog(tmp_path: Path) -> None:
    build = "from setuptools import build_meta as b; print(b.build_wheel('dist'), b.build_sdist('dist'))"
    source = sources(tmp_path / "source")
    process = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=True
    )
    wheel, sdist = process.stdout.splitlines()[-1].split()
    with zipfile.ZipFile(source / "dist" / wheel) as archive:
        names = archive.namelist()
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(path))
    assert any(name.endswith("share/doc/instar/CHANGELOG.md") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert metadata["Author"] == "Instar developers"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata["License-Expression"] == "Apache-2.0"
    with tarfile.open(source / "dist" / sdist) as archive:
        sdist_files = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "README.md", "src/instar/py.typed"} <= sdist_files


def test_an_installation_is_complete_and_has_the_demo(tmp_path: Path) -> None:
    source, site = sources(tmp_path / "source"), tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site)]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, *offline, str(source)], check=True)
    assert files(site / "instar") == files(ROOT / "src/instar")
    process = subprocess.run(
        [sys.executable, "-m", "instar", "init", "demo"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stderr) == (
        0,
        "wrote demo.yaml   next: instar train demo.yaml\n",
    )
    assert "insert_layers" in (tmp_path / "demo.yaml").read_text()
