"""What checkpoints do to a disk, each thing once and in few words.

A file's content is safe once it is synced; its name is safe once its folder is. Everything that
must outlive a loss of power goes through here, so that a recorder put in its place sees all of it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from contextlib import suppress
from pathlib import Path

ASIDE = ".tmp-"
"""What the name of anything unpublished begins with."""
TRASH = ".trash-"
"""What the name of anything given up begins with, until it is deleted."""
DELETER = "instar-deleter"
"""Name of the threads that delete."""


def make_folder(path: Path) -> None:
    """Make a folder and the missing ones above it."""
    path.mkdir(parents=True, exist_ok=True)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until its content is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Wait until the content of a file that somebody else wrote is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    sync_file(path)


def rename(path: Path, to: Path) -> None:
    """Give a file or folder another name; a file of that name is replaced, a folder is not."""
    path.rename(to)


def remove_tree(path: Path) -> None:
    """Delete a file, or a folder with all that is in it, as far as the disk lets us.

    What is left does no harm: nobody reads what bears such a name, and the next save sweeps.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file so that every reader, also after a crash, sees all of the old or of the new."""
    aside = path.with_name(f"{ASIDE}{secrets.token_hex(8)}")
    try:
        write_synced(aside, content)
        rename(aside, path)
    finally:
        remove_tree(aside)
    sync_folder(path.parent)


def discard(path: Path) -> None:
    """Delete a published folder: first its name, at once and as a whole, then what is in it.

    Nobody waits for the second part: giving up the pages of a large file takes as long as writing
    them. A process does not end before it is done.
    """
    trash = path.with_name(f"{TRASH}{path.name}-{secrets.token_hex(4)}")
    rename(path, trash)
    sync_folder(path.parent)
    threading.Thread(target=remove_tree, args=(trash,), name=DELETER).start()


def sweep(folder: Path) -> None:
    """Remove what a crash left unpublished or half deleted; nobody else may be writing here."""
    for pattern in (f"{ASIDE}*", f"{TRASH}*"):
        for left_behind in folder.glob(pattern):
            remove_tree(left_behind)
