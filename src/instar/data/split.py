"""Splits into train, val and test: a function of the sizes of documents or samples and the seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from instar.config.errors import ConfigError, ConfigProblem
from instar.config.files import read_regular
from instar.config.language import DataConfig
from instar.config.schema import Size
from instar.data.order import Int64Array, Shuffled, key_bytes

Parts = NDArray[np.int64]
"""Rows (document, first byte, end byte), [n, 3], ascending by document."""

_EPOCHS = {"select": 0, "split": 1, "sample": 2}
"""The epoch of a shuffled order that each purpose uses, so that draws are independent."""


def chosen_bytes(sizes: Int64Array, data: DataConfig, seed: int) -> Int64Array:
    """Return the bytes to take of each document: all, or about `max_bytes` in total."""
    if data.max_bytes is None:
        return sizes
    return first_bytes(sizes, data.max_bytes, seed, "select")


def divide(
    byte_counts: Int64Array, val_fraction: float, test_fraction: float, seed: int
) -> dict[str, Parts]:
    """Split documents as `divide_whole` or, where they are too few or too large for that, each of them, or all
    end to end where each is too small: the last parts become val and test.

    Args:
        byte_counts: the number of bytes to use of each document, [documents].
    """
    return _divide(byte_counts, _shares(val_fraction, test_fraction), seed)


def is_cut(splits: Mapping[str, Parts], byte_counts: Int64Array) -> bool:
    """Return whether parts of one document are in several splits."""
    return any((p[:, 2] - p[:, 1] < byte_counts[p[:, 0]]).any() for p in splits.values())


def divide_whole(
    byte_counts: Int64Array, val_fraction: float, test_fraction: float, seed: int
) -> dict[str, Parts] | None:
    """Split documents into train, val and, if requested, test; None if they are too few or too large for that.

    Whole documents, in an order given by the seed, are assigned to a held-out split while that brings it
    nearer to its share.

    Args:
        byte_counts: the number of bytes to use of each document, [documents].
    """
    targets = _targets(byte_counts, _shares(val_fraction, test_fraction))
    parts = _by_document(byte_counts, targets, seed)
    return parts if _is_near(parts, targets) else None


def divide_held_out(sizes: Int64Array, data: DataConfig, seed: int) -> dict[str, Parts]:
    """Split the documents of `val_source` into val and test, in the ratio of the two fractions."""
    shares = _shares(data.val_fraction, data.test_fraction)
    held_out = 1 - shares.pop("train")
    return _divide(sizes, {name: share / held_out for name, share in shares.items()}, seed)


def _shares(val_fraction: float, test_fraction: float) -> dict[str, float]:
    shares = {"train": 1 - val_fraction - test_fraction, "val": val_fraction}
    return shares | ({"test": test_fraction} if test_fraction > 0 else {})


def _divide(byte_counts: Int64Array, shares: dict[str, float], seed: int) -> dict[str, Parts]:
    targets = _targets(byte_counts, shares)
    for parts in (_by_document(byte_counts, targets, seed), _by_position(byte_counts, shares)):
        if _is_near(parts, targets):
            return parts
    return _end_to_end(byte_counts, shares)


def _targets(byte_counts: Int64Array, shares: dict[str, float]) -> dict[str, float]:
    return {name: share * float(byte_counts.sum()) for name, share in shares.items()}


def _is_near(parts: dict[str, Parts], targets: dict[str, float]) -> bool:
    sizes = {name: int((rows[:, 2] - rows[:, 1]).sum()) for name, rows in parts.items()}
    return all(abs(sizes[name] - target) <= 0.5 * target for name, target in targets.items())


def _by_document(byte_counts: Int64Array, targets: dict[str, float], seed: int) -> dict[str, Parts]:
    """Move whole documents from the first split to the others."""
    names = list(targets)
    split_of = np.zeros(byte_counts.size, dtype=np.int8)
    missing = {number: targets[name] for number, name in enumerate(names) if number}
    used = np.flatnonzero(byte_counts)
    smallest = int(byte_counts[used].min())
    for place in Shuffled(used.size, seed).indices(_EPOCHS["split"], 0, used.size).tolist():
        document, size = int(used[place]), int(byte_counts[used[place]])
        split = next((s for s, room in missing.items() if size / 2 <= room), None)
        if split is not None:
            split_of[document] = split
            missing[split] -= size
        elif all(room < smallest / 2 for room in missing.values()):
            break
    return {
        name: whole_documents(used[split_of[used] == split], byte_counts)
        for split, name in enumerate(names)
    }


def whole_documents(documents: Int64Array, byte_counts: Int64Array) -> Parts:
    """Return the wanted bytes of some documents as parts, each from byte 0."""
    return np.stack([documents, np.zeros_like(documents), byte_counts[documents]], axis=1)


def _by_position(byte_counts: Int64Array, shares: dict[str, float]) -> dict[str, Parts]:
    """Divide each document, in the order of the shares; of each, a share is rounded to whole bytes."""
    documents = np.arange(byte_counts.size)
    parts: dict[str, Parts] = {}
    begins, share = np.zeros_like(byte_counts), 0.0
    for name, split_share in shares.items():
        share += split_share
        ends = np.rint(byte_counts * min(share, 1.0)).astype(np.int64)
        parts[name] = np.stack([documents, begins, ends], axis=1)[ends > begins]
        begins = ends
    return parts


def _end_to_end(byte_counts: Int64Array, shares: dict[str, float]) -> dict[str, Parts]:
    """Divide the documents end to end, in the order of the shares: each has its size to within a byte.

    Documents of a few bytes have no such parts each: half of one byte is nothing or all of it.
    """
    documents, starts = np.arange(byte_counts.size), np.cumsum(byte_counts) - byte_counts
    total = int(byte_counts.sum())
    parts: dict[str, Parts] = {}
    begin, share = 0, 0.0
    for name, split_share in shares.items():
        share += split_share
        end = round(total * min(share, 1.0))
        begins, ends = (np.clip(place - starts, 0, byte_counts) for place in (begin, end))
        parts[name] = np.stack([documents, begins, ends], axis=1)[ends > begins]
        begin = end
    return parts


def first_bytes(
    sizes: Int64Array, limit: int, seed: int, purpose: Literal["select", "sample"]
) -> Int64Array:
    """Return how many bytes of each document are in the first `limit` bytes of a shuffled order."""
    order = Shuffled(sizes.size, seed).indices(_EPOCHS[purpose], 0, sizes.size)
    shuffled_sizes = sizes[order]
    before = np.cumsum(shuffled_sizes) - shuffled_sizes
    byte_counts = np.empty_like(sizes)
    byte_counts[order] = np.clip(limit - before, 0, shuffled_sizes)
    return byte_counts


HELD_OUT = ("val", "test")
UNUSED = "unused"
"""The training samples that `data.train_subset` leaves out."""
_VAL, _TEST = 1, 2
"""their numbers among the splits; that of train is 0"""


def divide_samples(
    total: int,
    *,
    val: Size | Int64Array,
    test: Size | Int64Array,
    seed: int,
    classes: Int64Array | None = None,
) -> dict[str, Int64Array]:
    """Split sample indices into train, val and test, each ascending and together all of `total`.

    A fraction applies to all samples and is rounded to the nearest count, halves up. A split given
    by its samples, or by a file of them, consists of these; the others are drawn from the rest, val
    before test: val does not depend on the size of test.

    Args:
        classes: the class of each sample, [total]. Drawn splits are then stratified: they take from
            every class its share of the available samples, to less than one sample; a class with
            too few samples may be absent from a held-out split, but not from train.

    Raises:
        ConfigError: with all problems of the sizes and files; or all samples of a class would be held out.
    """
    split_of, _, _ = _draw(total, val, test, seed, classes)
    return _splits(split_of, classes)


def divide_folds(
    total: int,
    fold: int,
    folds: int,
    *,
    val: Size | Int64Array,
    test: Size | Int64Array,
    seed: int,
    classes: Int64Array | None = None,
) -> dict[str, Int64Array]:
    """Split sample indices into train, val and test, where val is one of several folds.

    Test is that of `divide_samples`. All other samples are dealt out to the folds in turn, with classes one class
    after the other: sizes of folds differ by at most one, and so do their counts of a class, as those of
    scikit-learn's `StratifiedKFold`.

    Args:
        fold: from 0.
        val: of the division that has this test split.

    Raises:
        ConfigError: as `divide_samples`; or there are fewer samples than folds.
    """
    split_of, order, codes = _draw(total, val, test, seed, classes)
    rest = order[split_of[order] != _TEST]
    if rest.size < folds:
        raise _error("data.folds", f"{folds:,} folds of {rest.size:,} samples: some would be empty")
    by_class = rest[np.argsort(codes[rest], kind="stable")]
    split_of[rest] = 0
    split_of[by_class[fold::folds]] = _VAL
    return _splits(split_of, classes)


def _splits(split_of: NDArray[np.int8], classes: Int64Array | None) -> dict[str, Int64Array]:
    """Return the samples of each split; `split_of`: its number for each sample."""
    if classes is not None:
        _check_classes(classes, split_of)
    splits = {name: np.flatnonzero(split_of == n) for n, name in enumerate(("train", *HELD_OUT))}
    check_division(splits, split_of.size)
    return splits


def _draw(
    total: int,
    val: Size | Int64Array,
    test: Size | Int64Array,
    seed: int,
    classes: Int64Array | None,
) -> tuple[NDArray[np.int8], Int64Array, Int64Array]:
    """Return the number of each sample's split, the order of the draw, and the samples' classes as codes."""
    if total < 1:
        raise _error("data.path", "there are no samples to divide")
    if classes is not None and classes.shape != (total,):
        raise ValueError(f"{total} samples have classes of shape {list(classes.shape)}")
    resolved_sizes = _resolve_sizes(total, {"val": val, "test": test})
    split_of = np.zeros(total, dtype=np.int8)
    for number, name in enumerate(HELD_OUT, 1):
        if not isinstance(samples := resolved_sizes[name], int):
            split_of[samples] = number
    seed = int.from_bytes(key_bytes("division", seed, 0, 8), "little")
    codes = _codes(classes, total, seed)
    order = Shuffled(total, seed).indices(0, 0, total)
    for number, name in enumerate(HELD_OUT, 1):
        if isinstance(count := resolved_sizes[name], int):
            remaining = order[split_of[order] == 0]
            split_of[remaining[_first_of_each(codes[remaining], count)]] = number
    return split_of, order, codes


def subset_of(
    total: int, size: int | float, seed: int, unit: str, classes: Int64Array | None = None
) -> Int64Array:
    """Return which of `total` samples of a training split are trained on, ascending: as `data.train_subset` says.

    Without classes, a larger subset has all of a smaller one.

    Args:
        unit: what is counted, in the plural.
        classes: the class of each, of which the subset gets the same shares.

    Raises:
        ConfigError: there are fewer, or a share of them is none.
    """
    count, seed = subset_count(size, total, unit), subset_seed(seed)
    order = Shuffled(total, seed).indices(0, 0, total)
    chosen = order[_first_of_each(_codes(classes, total, seed)[order], count)]
    return np.sort(chosen)


def subset_count(size: int | float, total: int, unit: str) -> int:
    """Return how many of `total` are trained on. Raises ConfigError as `subset_of`."""
    count = size if isinstance(size, int) else math.floor(size * total + 0.5)
    if not 0 < count <= total:
        text = f"{size:g} of {total:,} {unit} of the training split is none"
        if count:
            text = f"{size:,} {unit}, and the training split has {total:,}"
        raise _error(
            "data.train_subset",
            text,
            "a larger share" if not count else "fewer, or a share below 1",
        )
    return count


def subset_remark(size: int | float, count: int, total: int, unit: str) -> str:
    """Say what was chosen of a training split."""
    return f"data.train_subset {size:,}: {count:,} of {total:,} {unit} of the training split"


def subset_seed(seed: int) -> int:
    """Return the seed of the order in which a subset is chosen."""
    return int.from_bytes(key_bytes("subset", seed, 0, 8), "little")


def check_division(splits: Mapping[str, Int64Array], total: int) -> None:
    """Raise ValueError unless each of `total` samples is in exactly one split."""
    numbers = np.concatenate([np.empty(0, dtype=np.int64), *splits.values()])
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < total:
        raise ValueError(f"samples {numbers.min()}..{numbers.max()} of {total} are divided")
    wrong = np.flatnonzero(np.bincount(numbers, minlength=total) != 1)
    if wrong.size:
        sample = int(wrong[0])
        names = [n for n, members in splits.items() for _ in np.flatnonzero(members == sample)]
        raise ValueError(f"sample {sample} is in {' and '.join(names) or 'no split'}")


def _resolve_sizes(
    total: int, sizes: Mapping[str, Size | Int64Array]
) -> dict[str, int | Int64Array]:
    """Return each split's number of samples, or its samples if they are given."""
    resolved_sizes: dict[str, int | Int64Array] = {}
    problems: list[ConfigProblem] = []
    for name, size in sizes.items():
        if isinstance(size, np.ndarray):
            resolved_sizes[name] = size
            continue
        try:
            resolved_sizes[name] = (
                _numbers(size, total, name) if isinstance(size, str) else _count(size, total, name)
            )
        except ConfigError as error:
            problems += error.problems
    if not problems:
        problems += _clashes(total, sizes, resolved_sizes)
    if problems:
        raise ConfigError(*problems)
    return resolved_sizes


def _clashes(
    total: int,
    sizes: Mapping[str, Size | Int64Array],
    resolved_sizes: Mapping[str, int | Int64Array],
) -> list[ConfigProblem]:
    """Return the conflicts between val and test."""
    val, test = resolved_sizes["val"], resolved_sizes["test"]
    if not (isinstance(val, int) or isinstance(test, int)):
        overlap = np.intersect1d(val, test)
        if overlap.size:
            message = f"sample {overlap[0]} is in the val split ({sizes['val']}) and in this one"
            return [ConfigProblem(("data.test",), message, place=str(sizes["test"]))]
    counts = {n: size if isinstance(size, int) else size.size for n, size in resolved_sizes.items()}
    if sum(counts.values()) < total:
        return []
    shares = [size for size in sizes.values() if isinstance(size, float)]
    if len(shares) == 2 and sum(shares) > 1:
        message = f"the shares of val and test sum to {sum(shares):g}, which is more than 1"
    else:
        message = (
            f"val ({counts['val']:,}) and test ({counts['test']:,}) take all of the {total:,} samples: "
            "nothing is left to train on"
        )
    return [ConfigProblem(("data.val",), message, "make them smaller", place="data.val, data.test")]


def _count(size: int | float, total: int, name: str) -> int:
    key = f"data.{name}"
    if isinstance(size, int):
        if size < 0:
            raise _error(key, f"a split cannot have {size} samples", _FORMS)
        return size
    if not 0 <= size < 1:
        raise _error(key, f"{size:g} is no share of the samples", _FORMS)
    count = math.floor(size * total + 0.5)
    if size > 0 and count == 0:
        message = f"a share of {size:g} of {total:,} samples is none"
        raise _error(key, message, "a larger share, a count, or 0 for no such split")
    return count


_FORMS = "a share from 0 to below 1, a count, or a text file of sample numbers"


def _numbers(path: str, total: int, name: str) -> Int64Array:
    """Return the sample numbers in a file, one per line; # starts a comment."""
    key = f"data.{name}"
    try:
        lines = read_regular(path, follow=True).decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise _error(key, f"{path!r} cannot be read: {reason}", _FORMS) from None
    line_of: dict[int, int] = {}
    for place, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where = f"{path}:{place}"
        if not (text.isascii() and text.isdigit()):
            raise _error(key, f"{text!r:.40} is no sample number", "one number a line", where)
        number = int(text)
        if number >= total:
            raise _error(key, f"there is no sample {number}", f"they are 0 to {total - 1}", where)
        if number in line_of:
            raise _error(key, f"sample {number} is already in line {line_of[number]}", "", where)
        line_of[number] = place
    if not line_of:
        raise _error(key, f"{path!r} has no sample numbers", f"or set {key} to 0 for no such split")
    return np.fromiter(line_of, dtype=np.int64, count=len(line_of))


def _error(key: str, message: str, hint: str = "", where: str = "") -> ConfigError:
    return ConfigError.of(message, where=where or key, hint=hint, key=key)


def _codes(classes: Int64Array | None, total: int, seed: int) -> Int64Array:
    """Return each sample's class as a code from 0, in a random order; all 0 without classes."""
    if classes is None:
        return np.zeros(total, dtype=np.int64)
    class_values, codes = np.unique(classes, return_inverse=True)
    return Shuffled(class_values.size, seed).indices(1, 0, class_values.size)[codes]


def _first_of_each(codes: Int64Array, count: int) -> NDArray[np.bool_]:
    """Return a mask of the first samples of each class, proportionally to its size, `count` in all.

    Fractional shares are rounded by the largest remainder; the lowest code wins a tie.
    """
    of_class = np.bincount(codes)
    counts, remainders = np.divmod(of_class * count, codes.size)
    more = np.argsort(-remainders, kind="stable")[: count - int(counts.sum())]
    counts[more] += 1
    by_code = np.argsort(codes, kind="stable")
    place = np.empty_like(codes)
    place[by_code] = np.arange(codes.size) - np.repeat(np.cumsum(of_class) - of_class, of_class)
    return place < counts[codes]


def _check_classes(classes: Int64Array, split_of: NDArray[np.int8]) -> None:
    """Raise ConfigError if a class has no sample left in train."""
    missing = np.setdiff1d(classes, classes[split_of == 0])
    if missing.size:
        size = int(np.count_nonzero(classes == missing[0]))
        more = f", and so would {missing.size - 1:,} more classes" if missing.size > 1 else ""
        raise _error(
            "data.stratify",
            f"class {missing[0]} has {size:,} sample{'s' * (size > 1)}, and all would be held out{more}",
            "hold out less, leave data.stratify out, or name another column",
        )
