"""Working directories for tiny real runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import figures
import pytest
from forks import Forks
from tiny_run import CONFIG, TEXT, Place


@pytest.fixture(scope="session")
def data_dir(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory whose tokens are made."""
    path = tmp_path_factory.mktemp("prepared")
    (path / "squares.txt").write_text(TEXT)
    (path / "run.yaml").write_text(CONFIG)
    (child,) = Place(path, forks).instar("data", "prepare", "run.yaml")
    assert child.finish() == 0, child.output()
    return path


@pytest.fixture
def place(data_dir: Path, forks: Forks, tmp_path: Path) -> Place:
    shutil.copytree(data_dir, tmp_path, dirs_exist_ok=True)
    return Place(tmp_path, forks)


# a real SLURM, which only `make torture` installs, and a second Ray cluster
collect_ignore = [] if figures.FULL else ["test_slurm.py", "test_ray.py"]
