"""Which samples are trained on, and which are held out to validate and to test.

A function of how many samples there are, of the config and of the seed: the same on every rank and
for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError, Problem
from instar.config.samples import SamplesConfig, Size
from instar.data.blocks import order_of
from instar.data.columns import Columns
from instar.data.order import Int64Array, Order, Shuffled, key_bytes
from instar.data.samples import Costed
from instar.data.source import Source, close
from instar.data.transform import transformed
from instar.data.workers import WorkerSource

HELD_OUT = ("val", "test")


def divide_samples(
    total: int, *, val: Size, test: Size, seed: int, classes: Int64Array | None = None
) -> dict[str, Int64Array]:
    """The samples of train, val and test, ascending; each of the `total` is in exactly one.

    A share is of all samples, rounded to the nearest count, halves up. A split given by a file has
    the samples that the file names; the others are drawn from what is left, val before test: val
    stays the same whatever share test has.

    Args:
        classes: a class for each sample, [total]. Drawn splits then take from every class its share
            of what there is to draw from, to less than one sample; where a class has too few, it
            may be missing in a split that is held out, but not in training.

    Raises:
        ConfigError: with all that is wrong with sizes or files; or all samples of a class would be
            held out.
    """
    if total < 1:
        raise _error("data.path", "there are no samples to divide")
    if classes is not None and classes.shape != (total,):
        raise ValueError(f"{total} samples have classes of shape {list(classes.shape)}")
    asked = _asked(total, {"val": val, "test": test})
    split_of = np.zeros(total, dtype=np.int8)
    for number, name in enumerate(HELD_OUT, 1):
        if not isinstance(chosen := asked[name], int):
            split_of[chosen] = number
    seed = int.from_bytes(key_bytes("division", seed, 0, 8), "little")
    codes = _codes(classes, total, seed)
    order = Shuffled(total, seed).indices(0, 0, total)
    for number, name in enumerate(HELD_OUT, 1):
        if isinstance(count := asked[name], int):
            left = order[split_of[order] == 0]
            split_of[left[_first_of_each(codes[left], count)]] = number
    if classes is not None:
        _check_classes(classes, split_of)
    splits = {name: np.flatnonzero(split_of == n) for n, name in enumerate(("train", *HELD_OUT))}
    check_division(splits, total)
    return splits


def check_division(splits: Mapping[str, Int64Array], total: int) -> None:
    """Raises ValueError unless each of `total` samples is in exactly one of the splits."""
    numbers = np.concatenate([np.empty(0, dtype=np.int64), *splits.values()])
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < total:
        raise ValueError(f"samples {numbers.min()}..{numbers.max()} of {total} are divided")
    wrong = np.flatnonzero(np.bincount(numbers, minlength=total) != 1)
    if wrong.size:
        sample = int(wrong[0])
        held = [n for n, members in splits.items() for _ in np.flatnonzero(members == sample)]
        raise ValueError(f"sample {sample} is in {' and '.join(held) or 'no split'}")


@dataclass(frozen=True, eq=False)
class Subset:
    """Chosen samples of a source: sample i is its sample `numbers[i]`.

    The source may be shared with others, so it is not closed with this.
    """

    source: Source
    numbers: Int64Array

    @cached_property
    def fingerprint(self) -> str:
        return f"{self.source.fingerprint}/{_digest(self.numbers)}"

    def __len__(self) -> int:
        return self.numbers.size

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        """Raises IndexError outside 0 … len-1."""
        if indices.size and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"samples {indices.min()}..{indices.max()} of {len(self)}")
        return self.source.read(self.numbers[indices], epoch)

    def weights(self, indices: Int64Array) -> float:
        return self.source.weights(self.numbers[indices])


@dataclass(frozen=True, eq=False)
class SampleSet:
    """Samples to train on and held-out ones, all of one source.

    Raises ValueError where a sample of the source is in no split, or in two.
    """

    source: Source
    """pickled for worker processes, if the config has any"""
    splits: Mapping[str, Int64Array]
    """the samples of train, val and test, ascending"""
    data: SamplesConfig
    costs: Int64Array | None = None
    """how much work each sample of the source is, where they differ"""

    def __post_init__(self) -> None:
        check_division(self.splits, len(self.source))

    @cached_property
    def fingerprint(self) -> str:
        """Of the samples and of how they are split."""
        told = [f"{name}/{_digest(numbers)}" for name, numbers in sorted(self.splits.items())]
        return xxhash.xxh3_128_hexdigest("\n".join([self.source.fingerprint, *told]).encode())

    def train(self, seed: int) -> tuple[Source, Order]:
        """Samples to train on, and the order in which they come."""
        numbers = self.splits["train"]
        opened = partial(_to_train_on, self.source, numbers, self.data, seed)
        source: Source = WorkerSource(opened, self.data.workers) if self.data.workers else opened()
        if self.costs is not None:
            source = Costed(source, self.costs[numbers])
        return source, order_of(self.data, numbers.size, seed)

    def held_out(self, split: str) -> Source:
        """Samples that are never trained on, as they are.

        Raises ConfigError where there is no such split, or nothing in it.
        """
        if split not in HELD_OUT:
            raise _error("data", f"there is no split {split!r} that is held out", "use val or test")
        if not self.splits[split].size:
            raise _error(
                f"data.{split}",
                f"the {split} split is empty",
                f"set data.{split} to a share, a count, or a file of sample numbers",
            )
        return Subset(self.source, self.splits[split])

    def close(self) -> None:
        """Let the source, which all splits share, give back what it holds."""
        close(self.source)


def _to_train_on(source: Source, numbers: Int64Array, data: SamplesConfig, seed: int) -> Source:
    # what is drawn for a sample hangs on its own number, not on its place in the split
    return Subset(transformed(source, data, seed), numbers)


def _digest(numbers: Int64Array) -> str:
    return xxhash.xxh3_128_hexdigest(numbers.astype("<i8").tobytes())


def _asked(total: int, sizes: Mapping[str, Size]) -> dict[str, int | Int64Array]:
    """How many samples each split is to have, or which."""
    asked: dict[str, int | Int64Array] = {}
    problems: list[Problem] = []
    for name, size in sizes.items():
        try:
            asked[name] = (
                _numbers(size, total, name) if isinstance(size, str) else _count(size, total, name)
            )
        except ConfigError as error:
            problems += error.problems
    if not problems:
        problems += _clashes(total, sizes, asked)
    if problems:
        raise ConfigError(*problems)
    return asked


def _clashes(
    total: int, sizes: Mapping[str, Size], asked: Mapping[str, int | Int64Array]
) -> list[Problem]:
    """What is wrong with val and test together."""
    val, test = asked["val"], asked["test"]
    if not (isinstance(val, int) or isinstance(test, int)):
        both = np.intersect1d(val, test)
        if both.size:
            message = f"sample {both[0]} is in the val split ({sizes['val']}) and in this one"
            return [Problem(message, str(sizes["test"]), key="data.test")]
    taken = {name: each if isinstance(each, int) else each.size for name, each in asked.items()}
    if sum(taken.values()) < total:
        return []
    shares = [size for size in sizes.values() if isinstance(size, float)]
    if len(shares) == 2 and sum(shares) > 1:
        message = f"the shares of val and test sum to {sum(shares):g}, which is more than 1"
    else:
        message = (
            f"val ({taken['val']:,}) and test ({taken['test']:,}) take all of the {total:,} samples: "
            "nothing is left to train on"
        )
    return [Problem(message, "data.val, data.test", hint="make them smaller", key="data.val")]


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
        raise _error(
            key,
            f"a share of {size:g} of {total:,} samples is none",
            "a larger share, a count, or 0 for no such split",
        )
    return count


_FORMS = "a share from 0 to below 1, a count, or a text file of sample numbers"


def _numbers(path: str, total: int, name: str) -> Int64Array:
    """The sample numbers in a file, one a line; # begins a comment."""
    key = f"data.{name}"
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
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
    return ConfigError.one(message, where=where or key, hint=hint, key=key)


def _codes(classes: Int64Array | None, total: int, seed: int) -> Int64Array:
    """A number from 0 for each sample's class, in an order that is drawn; without classes, 0."""
    if classes is None:
        return np.zeros(total, dtype=np.int64)
    there, codes = np.unique(classes, return_inverse=True)
    return Shuffled(there.size, seed).indices(1, 0, there.size)[codes]


def _first_of_each(codes: Int64Array, count: int) -> NDArray[np.bool_]:
    """Where the first samples of each class stand, `count` in all, as many as are its share.

    Shares that are no whole numbers go by the largest remainder; among equal ones the lowest class.
    """
    of_class = np.bincount(codes)
    wanted, remainders = np.divmod(of_class * count, codes.size)
    more = np.argsort(-remainders, kind="stable")[: count - int(wanted.sum())]
    wanted[more] += 1
    grouped = np.argsort(codes, kind="stable")
    place = np.empty_like(codes)
    place[grouped] = np.arange(codes.size) - np.repeat(np.cumsum(of_class) - of_class, of_class)
    return place < wanted[codes]


def _check_classes(classes: Int64Array, split_of: NDArray[np.int8]) -> None:
    """Raises ConfigError where no sample of a class is left to train on."""
    missing = np.setdiff1d(classes, classes[split_of == 0])
    if missing.size:
        size = int(np.count_nonzero(classes == missing[0]))
        more = f", and so would {missing.size - 1:,} more classes" if missing.size > 1 else ""
        raise _error(
            "data.stratify",
            f"class {missing[0]} has {size:,} sample{'s' * (size > 1)}, and all would be held "
            f"out{more}",
            "hold out less, leave data.stratify out, or name another column",
        )
