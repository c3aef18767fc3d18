"""What a child does that saves deltas and is disturbed at it; `forks.Child` runs these."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from savers import fill_disk, limit_files, mount_small_disk
from torch import Tensor

from instar.checkpoint.manifest import CheckpointError
from instar.extensions.delta.chain import links, load_state, verify_chain
from instar.extensions.delta.writer import DeltaWriter

ROWS = 1 << 18
"""of 2 bytes, in each of two tensors: 1 MiB an anchor"""
ANCHOR_EVERY = 5


def weights(step: int) -> dict[str, Tensor]:
    """Random weights, of which one in 32 differs from the step before; they say of which step they are."""
    base = torch.Generator().manual_seed(0)
    tensors = {}
    for name in ("one", "other"):
        tensor = torch.rand(ROWS, generator=base, dtype=torch.float32).bfloat16()
        tensor[step % 64 :: 64] = float(step % 256)
        tensor[:2] = torch.tensor([step // 256, step % 256], dtype=torch.bfloat16)
        tensors[name] = tensor
    return tensors


def holds(folder: Path, number: int, step: int) -> bool:
    """Whether a link holds the weights of a step, bit for bit."""
    actual, expected = load_state(folder, number), weights(step)
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[name].view(torch.int16), expected[name].view(torch.int16))
        for name in expected
    )


def save_for_ever(folder: str, first_step: int, log_path: str) -> None:
    """Save step after step; number and step go into `log_path` once a link is on disk."""
    writer = DeltaWriter(Path(folder), anchor_every=ANCHOR_EVERY)
    with Path(log_path).open("ab", buffering=0) as file:
        for step in itertools.count(first_step):
            writer.save(step, weights(step))
            for entry in writer.finished_links():
                file.write(b"%d %d\n" % (entry.link.number, entry.link.step))


def save_with_too_little_room(root: str, room_bytes: int, kind: str) -> int:
    """Save until the disk is full, then go on with all the room there is.

    Prints what happened as JSON. `kind`: "tmpfs", a small disk of its own on `root`, where this
    process may mount one; "limit", where no file may grow beyond that.
    """
    disk = Path(root)
    if kind == "tmpfs":
        try:
            mount_small_disk(disk, 16 << 20)
        except OSError as error:
            print(json.dumps({"refused": error.strerror}))
            return 0
    folder = disk / "deltas"
    messages = _save_steps(folder, range(3))
    before = _numbers(folder)
    with limit_files(room_bytes) if kind == "limit" else fill_disk(disk, room_bytes):
        messages += _save_steps(folder, range(2, 40))
    during = links(folder)
    verify_chain(folder)
    is_intact = all(holds(folder, link.number, link.step) for link in during)
    later_messages = _save_steps(folder, range(during[-1].step, during[-1].step + 3))
    verify_chain(folder)
    last = links(folder)[-1]
    facts = {
        "told": messages,
        "kept": _numbers(folder)[: len(before)] == before,
        "whole": is_intact and holds(folder, last.number, last.step),
        "then": later_messages,
        "more": last.step - during[-1].step,
        "numbers": _numbers(folder) == list(range(len(links(folder)))),
        "left_over": [path.name for path in folder.glob(".*")],
    }
    print(json.dumps(facts))
    return 0


def _save_steps(folder: Path, steps: range) -> list[str]:
    """Save these steps, until that fails; return how."""
    with _writing(folder) as writer:
        for step in steps:
            if writer.failure is None:
                writer.save(step, weights(step))
        try:
            writer.flush()
        except CheckpointError as error:
            return [str(error)]
    return []


@contextmanager
def _writing(folder: Path) -> Iterator[DeltaWriter]:
    writer = DeltaWriter(folder, anchor_every=ANCHOR_EVERY)
    try:
        yield writer
    finally:
        writer.close()


def _numbers(folder: Path) -> list[int]:
    return [link.number for link in links(folder)]
