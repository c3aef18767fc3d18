"""Test files compiled ahead, with their assertions as pytest rewrites them.

In a fresh clone, each worker of `pytest -n` would do this for all files: seven seconds of a core, as
long as it takes to import PyTorch and all the rest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

TESTS = Path(__file__).parents[1]


def compile_tests(config: pytest.Config) -> None:
    """Leave in each `__pycache__` what pytest would write there."""
    if sys.dont_write_bytecode:
        return
    for file in sorted(TESTS.rglob("*.py")):
        if not file.name.startswith("test_") and file.name != "conftest.py":
            continue
        folder = rewrite.get_cache_dir(file)
        compiled = folder / (file.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(file, compiled) is None and rewrite.try_makedirs(folder):
            source, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, compiled)
