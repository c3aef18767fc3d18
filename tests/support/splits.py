"""Token splits that no data set was prepared for."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from instar.data.text.shards import ShardFile, TokenSplit


def split_of(*shards: np.ndarray, name: str = "train", fingerprint: str = "by hand") -> TokenSplit:
    """A split of these uint16 shards, in files that have no names any more."""
    files = []
    for tokens in shards:
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(tokens.tobytes())
            files.append(ShardFile(Path(file.name), tokens.dtype, 0, tokens.size))
    offsets = np.cumsum([0, *(tokens.size for tokens in shards)], dtype=np.int64)
    return TokenSplit(name, tuple(files), offsets, fingerprint)
