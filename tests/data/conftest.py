from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from splits import split_of

from instar.config.language import DataConfig
from instar.data.text.prepare import prepare_dataset
from instar.data.text.shards import TokenSplit

MakeSplit = Callable[..., TokenSplit]


@pytest.fixture(scope="session")
def make_split() -> MakeSplit:
    """A split of 0, 1, 2 … in shards of the sizes given."""

    def make(*sizes: int, name: str = "train") -> TokenSplit:
        offsets = np.cumsum([0, *sizes], dtype=np.int64)
        tokens = np.arange(offsets[-1], dtype=np.uint16)
        shards = (tokens[begin:end] for begin, end in itertools.pairwise(offsets))
        return split_of(*shards, name=name, fingerprint="counting")

    return make


@pytest.fixture
def dataset_folder(tmp_path: Path) -> Path:
    """A small prepared data set of bytes."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text\n" for number in range(200)))
    return prepare_dataset(DataConfig(source=str(text)), seed=1, path=tmp_path / "prepared")
