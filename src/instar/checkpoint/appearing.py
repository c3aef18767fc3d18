"""A new folder that is there whole or not at all."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from instar.checkpoint import disk
from instar.checkpoint.manifest import CheckpointError


def check_new(folder: Path) -> None:
    """Raise CheckpointError unless `folder` is empty or not there."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; choose a new folder")
    if folder.is_dir() and (first := next(folder.iterdir(), None)):
        raise CheckpointError(f"{folder} is not empty, it holds {first.name}; choose a new folder")


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to write in, which becomes `folder` at the end.

    Raises:
        CheckpointError: the disk does not let us.
    """
    from safetensors import SafetensorError

    folder = folder.absolute()
    aside = folder.with_name(f"{disk.ASIDE}{folder.name}-{secrets.token_hex(4)}")
    try:
        disk.make_folder(aside)
        try:
            yield aside
            disk.sync_folder(aside)
            disk.rename(aside, folder)
            disk.sync_folder(folder.parent)
        finally:
            disk.remove_tree(aside)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {folder}: {error}") from error
