"""A tiny corpus and config in a folder, and `instar` typed there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import INSTAR, Forks

TEXT = "".join(f"{n} squared is {n * n}, and {n} cubed is {n**3}.\n" for n in range(300))

TINY = """\
name: tiny
model: {n_layer: 2, n_head: 2, n_embd: 32, context: 16}
data: {source: squares.txt, path: tokens, tokenizer: char}
train: {until: 8it, batch_size: 4}
learning_rate: {warmup_iters: 2}
record: {sample_tokens: 4, report: false}
"""

Instar = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def fill() -> Callable[[Path], Path]:
    """Puts the corpus and the config into a folder."""

    def fill_folder(folder: Path) -> Path:
        (folder / "squares.txt").write_text(TEXT)
        (folder / "tiny.yaml").write_text(TINY)
        return folder

    return fill_folder


@pytest.fixture
def place(tmp_path: Path, fill: Callable[[Path], Path]) -> Path:
    return fill(tmp_path)


@pytest.fixture
def instar(place: Path, forks: Forks) -> Instar:
    """The installed command, in a process that has imported everything; its streams apart."""

    def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [forks.command, *arguments],
            cwd=place,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == code, result.stdout + result.stderr
        return result

    return run


RunCli = Callable[..., str]


@pytest.fixture
def run_cli(place: Path, forks: Forks) -> RunCli:
    """`instar` typed in a folder, in a process that has imported everything; what it says."""

    def run(*words: object, code: int = 0, where: Path = place) -> str:
        child = forks.start(INSTAR, [str(word) for word in words], place=where)
        assert child.finish() == code, child.output()
        return child.output()

    return run
