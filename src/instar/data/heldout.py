"""What is held out of a run whose training data is read from its beginning only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from instar.config.language import DataConfig
from instar.data.prepare import default_path, is_made, made_from, write_made, write_split
from instar.data.rows import held_out_tokens
from instar.data.tokenizer import named_tokenizer
from instar.data.tokens import publishing


def prepare_held_out(
    data: DataConfig, seed: int, say: Callable[[str], None] = lambda _: None
) -> Path:
    """Make the folder of a stream: its tokenizer, and `val_source` as token shards.

    A folder that is already there is left as it is. Raises ConfigError for bad input, and where
    the folder holds something else.
    """
    folder = Path(data.path or default_path(data, seed))
    if is_made(folder, data, seed, say):
        return folder
    tokenizer = named_tokenizer(data.tokenizer)
    assert tokenizer is not None  # the config's checks refuse one that would be trained
    say(f"preparing what is held out, {data.val_source} → {folder}")
    with publishing(folder) as aside:
        splits = {
            name: write_split(aside, name, tokens, tokenizer, data)
            for name, tokens in held_out_tokens(data, seed, tokenizer).items()
        }
        write_made(aside, tokenizer, splits, made_from(data, seed, np.empty(0, np.int64)))
    return folder
