"""Which documents are trained on and which are held out: a function of their sizes and the seed."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from instar.config.language import DataConfig
from instar.data.order import Int64Array, Shuffled

Parts = NDArray[np.int64]
"""Rows (document, first byte, end byte), [n, 3], ascending by document."""

_EPOCHS = {"select": 0, "split": 1, "sample": 2}
"""The epochs of a shuffled order that are used, so that no draw repeats another."""


def chosen_bytes(sizes: Int64Array, data: DataConfig, seed: int) -> Int64Array:
    """How many bytes of each document are taken: all, or about `max_bytes` over all of them."""
    if data.max_bytes is None:
        return sizes
    return first_bytes(sizes, data.max_bytes, seed, "select")


def divide(
    wanted: Int64Array, val_fraction: float, test_fraction: float, seed: int
) -> dict[str, Parts]:
    """Split documents into train, val and, if asked for, test.

    `wanted` is how many bytes of each document count, [documents]. Whole documents, in an order
    that comes from the seed, go where they bring a held-out split nearer to its share. Where
    documents are too few or too large for that, they are laid end to end and cut by position;
    the last parts become val and test.
    """
    return _divide(wanted, _shares(val_fraction, test_fraction), seed)


def divide_whole(
    wanted: Int64Array, val_fraction: float, test_fraction: float, seed: int
) -> dict[str, Parts] | None:
    """As `divide`, by whole documents; None where they are too few or too large for that."""
    targets = _targets(wanted, _shares(val_fraction, test_fraction))
    parts = _by_document(wanted, targets, seed)
    return parts if _is_near(parts, targets) else None


def divide_held_out(sizes: Int64Array, data: DataConfig, seed: int) -> dict[str, Parts]:
    """The documents of `val_source`: val, and test in the ratio of the two fractions."""
    shares = _shares(data.val_fraction, data.test_fraction)
    held_out = 1 - shares.pop("train")
    return _divide(sizes, {name: share / held_out for name, share in shares.items()}, seed)


def _shares(val_fraction: float, test_fraction: float) -> dict[str, float]:
    shares = {"train": 1 - val_fraction - test_fraction, "val": val_fraction}
    return shares | ({"test": test_fraction} if test_fraction > 0 else {})


def _divide(wanted: Int64Array, shares: dict[str, float], seed: int) -> dict[str, Parts]:
    targets = _targets(wanted, shares)
    parts = _by_document(wanted, targets, seed)
    return parts if _is_near(parts, targets) else _by_position(wanted, targets)


def _targets(wanted: Int64Array, shares: dict[str, float]) -> dict[str, float]:
    return {name: share * float(wanted.sum()) for name, share in shares.items()}


def _is_near(parts: dict[str, Parts], targets: dict[str, float]) -> bool:
    realised = {name: int((rows[:, 2] - rows[:, 1]).sum()) for name, rows in parts.items()}
    return all(abs(realised[name] - target) <= 0.5 * target for name, target in targets.items())


def _by_document(wanted: Int64Array, targets: dict[str, float], seed: int) -> dict[str, Parts]:
    """Documents leave the first split for the others."""
    names = list(targets)
    split_of = np.zeros(wanted.size, dtype=np.int8)
    missing = {number: targets[name] for number, name in enumerate(names) if number}
    used = np.flatnonzero(wanted)
    smallest = int(wanted[used].min())
    for place in Shuffled(used.size, seed).indices(_EPOCHS["split"], 0, used.size).tolist():
        document, size = int(used[place]), int(wanted[used[place]])
        split = next((s for s, room in missing.items() if size / 2 <= room), None)
        if split is not None:
            split_of[document] = split
            missing[split] -= size
        elif all(room < smallest / 2 for room in missing.values()):
            break
    return {name: whole(used[split_of[used] == split], wanted) for split, name in enumerate(names)}


def whole(documents: Int64Array, wanted: Int64Array) -> Parts:
    """All that is wanted of some documents."""
    return np.stack([documents, np.zeros_like(documents), wanted[documents]], axis=1)


def _by_position(wanted: Int64Array, targets: dict[str, float]) -> dict[str, Parts]:
    documents = np.arange(wanted.size)
    starts = np.cumsum(wanted) - wanted
    parts: dict[str, Parts] = {}
    begin, share = 0, 0.0
    for name, target in targets.items():
        share += target
        end = round(share)
        firsts = np.clip(begin - starts, 0, wanted)
        ends = np.clip(end - starts, 0, wanted)
        parts[name] = np.stack([documents, firsts, ends], axis=1)[ends > firsts]
        begin = end
    return parts


def first_bytes(
    sizes: Int64Array, limit: int, seed: int, purpose: Literal["select", "sample"]
) -> Int64Array:
    """How much of each document is within the first `limit` bytes of a shuffled order."""
    order = Shuffled(sizes.size, seed).indices(_EPOCHS[purpose], 0, sizes.size)
    shuffled = sizes[order]
    before = np.cumsum(shuffled) - shuffled
    wanted = np.empty_like(sizes)
    wanted[order] = np.clip(limit - before, 0, shuffled)
    return wanted
