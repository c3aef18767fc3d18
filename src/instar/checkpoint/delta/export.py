"""A state of a chain as a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path

from instar.checkpoint.delta.replay import checkout
from instar.checkpoint.manifest import SUFFIX, CheckpointError
from instar.config.files import read_regular
from instar.record import atomic

_COPIED = {".json", ".jinja", ".txt", ".model"}
"""Suffixes of the files of configs and tokenizers."""


def export(chain: Path, number: int | None, like: Path, folder: Path) -> None:
    """Writes a state and the config and tokenizer of another model of the same kind.

    The folder is published atomically.

    Raises:
        CheckpointError: there is no such state, a file that leads to it is damaged, or a file of
            `like` cannot be read.
        WriteError: the folder cannot be written or is not empty.
    """
    atomic.check_new(folder)
    with atomic.atomic_dir(folder) as temporary:
        checkout(chain, number, temporary / f"model{SUFFIX}")
        for path in sorted(like.iterdir()):
            if path.suffix in _COPIED and not path.name.endswith(f"{SUFFIX}.index.json"):
                try:
                    content = read_regular(path, follow=True)
                except OSError as error:
                    raise CheckpointError(f"{path}: {error.strerror}") from error
                atomic.write_synced(temporary / path.name, content)
