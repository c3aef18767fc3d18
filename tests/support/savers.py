"""What a child does that saves checkpoints and is disturbed at it; `forks.Child` runs these."""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import in_parts
import torch

from instar.checkpoint.listing import latest_intact
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import Checkpoint, CheckpointContent, Tensors, publish_checkpoint
from instar.config.schema import ParallelConfig
from instar.distributed.world import join_group

SAVE_LIMIT_S = 20.0
"""after which ranks give up one that has not come"""
ROWS = 1 << 16
"""of 4 bytes, in each of nine tensors: 2.25 MiB a checkpoint"""
COMPONENTS = {"model": 2, "optimizer": 4, "ema": 2, "rng": 1}
CLONE_NEWNS = 0x00020000
MS_PRIVATE_FOR_ALL = (1 << 14) | (1 << 18)


def components(step: int, rows: int = ROWS) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors that say of which step and which component they are."""
    return {
        name: {f"weight.{i}": torch.full((rows,), float(1000 * step + i)) for i in range(count)}
        for name, count in COMPONENTS.items()
    }


def save(root: Path, step: int, rows: int = ROWS) -> Path:
    return publish_checkpoint(
        root, step, CheckpointContent(components(step, rows), {"step": step}, {})
    )


def holds(checkpoint: Checkpoint) -> bool:
    """Whether everything in a checkpoint is of its step."""
    step = checkpoint.manifest.step
    return checkpoint.state == {"step": step} and all(
        bool((tensor == 1000 * step + i).all())
        for name, count in COMPONENTS.items()
        for i, tensor in enumerate(checkpoint.tensors(name)[f"weight.{i}"] for i in range(count))
    )


def save_for_ever(root: str, first_step: int, log_path: str) -> None:
    """Save step after step; each goes into the file `log_path` once `publish` has returned."""
    with Path(log_path).open("ab", buffering=0) as file:
        for step in itertools.count(first_step):
            save(Path(root), step)
            file.write(b"%d\n" % step)


def save_in_parts_for_ever(root: str, first_step: int, log_path: str) -> None:
    """As one of several ranks, which have some rows of each tensor; rank 0 acknowledges."""
    with join_group(ParallelConfig(timeout_s=SAVE_LIMIT_S), "cpu") as world:
        for step in itertools.count(first_step):
            state = components(step)
            parts: dict[str, Tensors] = {
                name: {
                    key: in_parts.rows_of(t, world.rank, world.size) for key, t in tensors.items()
                }
                for name, tensors in state.items()
            }
            parts["rng"] = state["rng"]
            publish_checkpoint(
                Path(root), step, CheckpointContent(parts, {"step": step}, {}), world=world
            )
            if world.is_main:
                with Path(log_path).open("ab", buffering=0) as file:
                    file.write(b"%d\n" % step)


def save_with_too_little_room(root: str, step: int, room_bytes: int, kind: str) -> int:
    """Save where the disk ends after `room_bytes`, then again with all the room there is.

    Prints what happened as JSON. `kind`: "tmpfs", a small disk of its own on `root`, where this
    process may mount one; "limit", where no file may grow beyond that.
    """
    folder = Path(root)
    if kind == "tmpfs":
        try:
            mount_small_disk(folder, 3 * _size_bytes())
        except OSError as error:
            print(json.dumps({"refused": os.strerror(error.errno or 0)}))
            return 0
    save(folder, step)
    before = _names(folder)
    message = ""
    with limit_files(room_bytes) if kind == "limit" else fill_disk(folder, room_bytes):
        try:
            save(folder, step + 1)
        except CheckpointError as error:
            message = str(error)
    after = _names(folder)
    intact, skips = latest_intact(folder)
    save(folder, step + 2)
    last, _ = latest_intact(folder)
    left_over = [path.name for path in (folder / "checkpoints").glob(".*")]
    facts: dict[str, object] = {"told": message, "before": before, "after": after}
    facts |= {"found": intact.path.name}
    facts |= {"skipped": len(skips), "then": last.path.name, "left_over": left_over}
    print(json.dumps(facts))
    return 0


def _size_bytes() -> int:
    return 4 * ROWS * sum(COMPONENTS.values()) + (64 << 10)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@contextmanager
def limit_files(room_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def fill_disk(folder: Path, room_bytes: int) -> Iterator[None]:
    """A file that leaves only so much of the disk."""
    filler = folder / "filler"
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free - room_bytes))
    try:
        yield
    finally:
        filler.unlink()


def mount_small_disk(folder: Path, size_bytes: int) -> None:
    """In a mount namespace of this process's own, which ends with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={size_bytes}".encode()
    mount_point = os.fsencode(folder)
    if (
        libc.unshare(CLONE_NEWNS)
        or libc.mount(None, b"/", None, MS_PRIVATE_FOR_ALL, None)
        or libc.mount(b"tmpfs", mount_point, b"tmpfs", 0, options)
    ):
        raise OSError(ctypes.get_errno() or errno.EPERM, "cannot mount")
