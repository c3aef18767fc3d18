"""Which checkpoints stay: the newest, the best, and every so many steps one for ever."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from instar.checkpoint import disk
from instar.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from instar.checkpoint.store import checkpoints, pointed_at, pointers


@dataclass(frozen=True)
class Keep:
    """How many checkpoints stay."""

    last: int
    """of those saved last; at least 1"""
    best: int = 1
    """of those with the lowest validation loss"""
    every: int | None = None
    """those whose step is a multiple of it stay for ever"""


def superfluous(manifests: Sequence[tuple[Path, Manifest]], keep: Keep) -> list[Path]:
    """Those that `keep` does not ask for, of some given in the order in which they were saved."""
    kept = {path for path, _ in manifests[-keep.last :]}
    judged = [
        (manifest.loss, -index, path)
        for index, (path, manifest) in enumerate(manifests)
        if manifest.loss is not None and math.isfinite(manifest.loss)
    ]
    kept |= {path for *_, path in sorted(judged)[: keep.best]}
    if keep.every is not None:
        kept |= {path for path, manifest in manifests if manifest.step % keep.every == 0}
    return [path for path, _ in manifests if path not in kept]


def prune(root: Path, keep: Keep) -> list[Path]:
    """Delete the run's superfluous checkpoints and return what they were.

    What `latest`, `best` and `best-…` name stays, and so does anything whose manifest cannot be read: it may
    be all that is left of something. Each loses its name first, so that no reader ever finds a part.

    Raises:
        CheckpointError: the disk does not let us.
    """
    readable: list[tuple[Path, Manifest]] = []
    for path in checkpoints(root):
        try:
            readable.append((path, read_manifest(path)))
        except CheckpointError:
            continue
    named = {pointed_at(root, pointer) for pointer in pointers(root)}
    gone = [path for path in superfluous(readable, keep) if path not in named]
    try:
        for path in gone:
            disk.discard(path)
    except OSError as error:
        raise CheckpointError(f"cannot delete {path}: {error}") from error
    return gone
