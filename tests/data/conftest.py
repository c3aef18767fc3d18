from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from instar.config.language import DataConfig
from instar.data.prepare import prepare
from instar.data.tokens import TokenSplit

MakeSplit = Callable[..., TokenSplit]


@pytest.fixture(scope="session")
def make_split() -> MakeSplit:
    """A split in memory: tokens 0, 1, 2 … cut into shards of the sizes given."""

    def make(*sizes: int, name: str = "train") -> TokenSplit:
        offsets = np.cumsum([0, *sizes], dtype=np.int64)
        tokens = np.arange(offsets[-1], dtype=np.uint16)
        arrays = tuple(tokens[begin:end] for begin, end in itertools.pairwise(offsets))
        return TokenSplit(name=name, arrays=arrays, offsets=offsets, fingerprint="counting")

    return make


@pytest.fixture
def dataset_folder(tmp_path: Path) -> Path:
    """A small prepared data set of bytes."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text\n" for number in range(200)))
    return prepare(DataConfig(source=str(text)), seed=1, path=tmp_path / "prepared")
