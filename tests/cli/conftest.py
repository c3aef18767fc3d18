"""A tiny corpus and config in a folder, and `instar` typed there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TEXT = "".join(f"{n} squared is {n * n}, and {n} cubed is {n**3}.\n" for n in range(300))

TINY = """\
name: tiny
model: {n_layer: 2, n_head: 2, n_embd: 32, context: 16}
data: {source: squares.txt, path: tokens, tokenizer: char}
train: {until: 8it, batch_size: 4}
learning_rate: {warmup_iters: 2}
"""

Instar = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "squares.txt").write_text(TEXT)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


@pytest.fixture
def instar(place: Path) -> Instar:
    def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "instar.cli.main", *arguments],
            cwd=place,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run
