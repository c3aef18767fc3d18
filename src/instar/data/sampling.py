"""How training samples are drawn where some are to come more often: by a weight each, or classes equally often.

Both are orders like all others: pure functions of (seed, epoch, position). An epoch has as many draws as there are
training samples. Held-out samples are never drawn so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.config.schema import SamplesConfig
from instar.data.columns import Columns, Ragged, leaves
from instar.data.order import (
    Int64Array,
    Order,
    UInt64Array,
    check_positions,
    key_bytes,
    mix64,
    permute_within,
    permuted_apart,
    round_keys,
)
from instar.data.source import Columnar, InMemorySource, Source

_NAMED_CLASSES = 8
_READ_AT_ONCE = 1024
_LARGEST = 2**63 - 1


class DrawRule(Protocol):
    """How often each sample of a source is drawn."""

    @property
    def fingerprint(self) -> str: ...

    def order(self, numbers: Int64Array, seed: int) -> Order:
        """Return the order of the training samples `numbers`, which gives their places among these."""
        ...

    def describe(self, numbers: Int64Array) -> str:
        """Say how often the training samples are drawn."""
        ...


@dataclass(frozen=True, eq=False)
class WeightedDraws:
    """Draws a sample at each position, independently and with replacement, with a probability proportional to its
    weight: the distribution of torch's `WeightedRandomSampler`."""

    cumulative: NDArray[np.float64]
    """sums of the weights up to each sample, [samples]"""
    seed: int

    @property
    def samples_per_epoch(self) -> int:
        return self.cumulative.size

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        check_positions(self, epoch, start, stop)
        key = _key("weighted", self.seed, epoch)
        words = mix64(np.arange(start, stop, dtype=np.uint64), key)
        # 53 bits are a float's: below 1, so that no draw lies behind the last weight above 0
        shares = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        sums = self.cumulative
        samples: Int64Array = np.searchsorted(sums, shares * sums[-1], side="right")
        return samples


@dataclass(frozen=True, eq=False)
class BalancedDraws:
    """Draws classes in turn: a period of the order has one sample of each class, in a shuffled order. Each class goes
    through its samples in an order of its own, so that none comes twice before all of its class have come.

    Period p has draw p of every class, so that no count of earlier draws is needed.
    """

    by_class: Int64Array
    """the samples, those of a class together, [samples]"""
    sizes: Int64Array
    """the samples of each class, [classes]"""
    seed: int

    @property
    def samples_per_epoch(self) -> int:
        return self.by_class.size

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        check_positions(self, epoch, start, stop)
        begin = epoch * self.samples_per_epoch
        positions = np.arange(begin + start, begin + stop, dtype=np.uint64)
        periods, turns = np.divmod(positions, np.uint64(self.sizes.size))
        turns_key = _key("turns of classes", self.seed)
        classes = permuted_apart(turns, self.sizes.size, periods, turns_key).astype(np.int64)
        samples: Int64Array = self.by_class[self._firsts[classes] + self._places(classes, periods)]
        return samples

    @cached_property
    def _firsts(self) -> Int64Array:
        """The place of the first sample of each class among `by_class`."""
        return np.cumsum(self.sizes) - self.sizes

    @cached_property
    def _bits(self) -> Int64Array:
        """The bits of a place within each class."""
        return np.array([(size - 1).bit_length() for size in self.sizes.tolist()])

    def _places(self, classes: Int64Array, draws: UInt64Array) -> Int64Array:
        """Return the place within its class of each draw of it."""
        sizes = self.sizes.astype(np.uint64)[classes]
        passes, offsets = np.divmod(draws, sizes)
        domains = passes * np.uint64(self.sizes.size) + classes.astype(np.uint64)
        key, bits_of = _key("samples of classes", self.seed), self._bits[classes]
        places = np.empty_like(classes)
        for bits in np.unique(bits_of).tolist():
            rows = np.flatnonzero(bits_of == bits)
            keys = round_keys(domains[rows], 1 << bits, key)
            places[rows] = permute_within(offsets[rows], sizes[rows], bits, keys)
        return places


def _key(purpose: str, seed: int, epoch: int = 0) -> np.uint64:
    return np.uint64(int.from_bytes(key_bytes(purpose, seed, epoch, 8), "little"))


@dataclass(frozen=True, eq=False)
class Draws:
    """An order that tells draws of one sample apart, so that each may be transformed with other random numbers: at
    position p of an epoch, it gives the sample + p × the number of samples."""

    order: Order
    samples: int

    @property
    def samples_per_epoch(self) -> int:
        return self.order.samples_per_epoch

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        # as many draws are told apart as int64 holds: 9 × 10⁷ of 10¹¹ samples
        places = np.arange(start, stop, dtype=np.int64) % (_LARGEST // self.samples)
        return self.order.indices(epoch, start, stop) + places * self.samples


@dataclass(frozen=True, eq=False)
class WeightedSampling:
    """Samples are drawn with replacement by their weights."""

    weights: NDArray[np.float64]
    """of each sample of the source, held out or not, [samples]"""
    name: str

    @property
    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.weights.astype("<f8").tobytes())

    def order(self, numbers: Int64Array, seed: int) -> Order:
        weights = self.weights[numbers]
        return WeightedDraws(np.cumsum(weights / weights.max()), seed)

    def describe(self, numbers: Int64Array) -> str:
        weights = self.weights[numbers] / self.weights[numbers].max()
        with np.errstate(divide="ignore"):  # a lone sample always comes
            missed = np.exp(weights.size * np.log1p(-weights / weights.sum()))
        distinct = (1 - missed).sum()
        never = int(np.count_nonzero(weights == 0))
        text = f"drawn by {self.name}: {distinct:,.0f} of {weights.size:,} samples are expected to come in an epoch"
        return f"{text}; {never:,} never do, whose weight is 0" if never else text


@dataclass(frozen=True, eq=False)
class BalancedSampling:
    """Classes are drawn equally often, see `BalancedDraws`."""

    classes: Int64Array
    """of each sample of the source, held out or not, [samples]"""
    name: str

    @property
    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.classes.astype("<i8").tobytes())

    def order(self, numbers: Int64Array, seed: int) -> Order:
        classes = self.classes[numbers]
        sizes = np.unique_counts(classes).counts
        return BalancedDraws(np.argsort(classes, kind="stable"), sizes, seed)

    def describe(self, numbers: Int64Array) -> str:
        labels, counts = np.unique_counts(self.classes[numbers])
        about = "about " * (numbers.size % labels.size > 0)
        draws = f"{about}{numbers.size / labels.size:,.0f}"
        pairs = zip(labels.tolist(), counts.tolist(), strict=True)
        texts = [f"class {label} {count:,} → {draws}" for label, count in pairs]
        if (more := labels.size - _NAMED_CLASSES) > 0:
            texts = [*texts[:_NAMED_CLASSES], f"and {more:,} more classes"]
        return f"balanced by {self.name}, samples → draws of an epoch: {', '.join(texts)}"


def sampling_of(
    source: Source,
    train: Int64Array,
    data: SamplesConfig,
    loader_weights: NDArray[np.float64] | None = None,
) -> DrawRule | None:
    """Return how training samples are drawn, as the config or a user's `DataLoader` says; None: each once an epoch.

    Args:
        train: the samples of the training split.
        loader_weights: of the source's first samples; the others are held out.

    Raises:
        ConfigError: the column is not there or cannot be used, or both say it.
    """
    if loader_weights is not None:
        key = "data.balance" if data.balance is not None else "data.sample_weights"
        if data.balance is not None or data.sample_weights is not None:
            text = f"{key} says how samples are drawn, and so does the DataLoader's WeightedRandomSampler"
            raise ConfigError.at(key, text, "leave one of them out")
        if data.order in ("sequential", "blocks"):
            text = f"data.order {data.order}, and a DataLoader with a WeightedRandomSampler"
            raise ConfigError.at("data.order", text, "leave one of them out")
        weights = np.zeros(len(source))
        weights[: loader_weights.size] = loader_weights
        of_loader = "the DataLoader's weights"
        return WeightedSampling(_checked_weights(weights, train, "task", of_loader), of_loader)
    if (name := data.sample_weights) is not None:
        column = numbers_in_column(source, name, "data.sample_weights", "weights")
        return WeightedSampling(_checked_weights(column, train, "data.sample_weights", name), name)
    if data.balance is not None:
        classes = classes_of(source, data.balance, "data.balance")
        _check_classes(classes, train, data.balance)
        return BalancedSampling(classes, data.balance)
    return None


def numbers_in_column(source: Source, name: str, key: str, content: str) -> NDArray[Any]:
    """Return a column with a number for each sample, [samples]. Of a source that only reads samples, all are read.

    Args:
        key: the key of the config that names the column.
        content: what the column holds, for messages.

    Raises:
        ConfigError: there is no such column, or it holds no numbers, or several for a sample.
    """
    if isinstance(source, Columnar):
        return _numbers_of({name: np.asarray(source.column(name))}, name, key, content)
    if isinstance(source, InMemorySource):
        return _numbers_of(source.columns, name, key, content)
    begins = range(0, len(source), _READ_AT_ONCE)
    chunks = (np.arange(begin, min(begin + _READ_AT_ONCE, len(source))) for begin in begins)
    return np.concatenate([_numbers_of(source.read(c), name, key, content) for c in chunks])


def _numbers_of(columns: Columns, name: str, key: str, content: str) -> NDArray[Any]:
    named = dict(leaves(columns))
    if name not in named:
        text = f"there is no column {name!r} of {content}"
        raise ConfigError.at(key, text, f"there are {', '.join(named)}")
    column = named[name]
    if isinstance(column, Ragged) or column.ndim != 1:
        raise ConfigError.at(key, f"column {name!r} does not have one number for each sample")
    return column


def classes_of(source: Source, name: str, key: str) -> Int64Array:
    """Return a column of classes, int64 [samples].

    Raises:
        ConfigError: as `numbers_in_column`; or a value is no whole number.
    """
    column = numbers_in_column(source, name, key, "classes")
    if column.dtype.kind == "c":
        raise ConfigError.at(key, f"column {name!r} is {column.dtype}: classes are whole numbers")
    with np.errstate(invalid="ignore"):  # of what is no number
        classes = column.astype(np.int64)
    if (wrong := np.flatnonzero(classes != column)).size:
        text = f"column {name!r} is {column[wrong[0]]:g} in sample {wrong[0]}: classes are whole numbers"
        raise ConfigError.at(key, text, "name a column of classes")
    return classes


def _check_classes(classes: Int64Array, train: Int64Array, name: str) -> None:
    """Raise ConfigError if classes cannot take turns."""
    labels = np.unique(classes[train])
    if labels.size == train.size:
        text = f"each of {train.size:,} training samples has a class of its own in column {name!r}"
        raise ConfigError.at("data.balance", text, "name a column of classes")
    if (absent := np.setdiff1d(classes, labels)).size:
        others = (
            f"have {absent.size - 1:,} more classes"
            if absent.size > 2
            else f"has class {absent[-1]}"
        )
        more = f", nor {others}" if absent.size > 1 else ""
        text = f"class {absent[0]} of column {name!r} has no training sample{more}: all are held out or unused"
        raise ConfigError.at("data.balance", text, "set data.stratify too, or hold out less")
    if labels.size < 2:
        text = f"all training samples have the class {labels[0]} in column {name!r}"
        raise ConfigError.at("data.balance", text, "leave it out, or name another column")


def _checked_weights(
    column: NDArray[Any], train: Int64Array, key: str, name: str
) -> NDArray[np.float64]:
    """Return weights as float64. Raises ConfigError if they are none of the training samples."""
    if column.dtype.kind == "c":
        raise ConfigError.at(key, f"{name}: {column.dtype} is no type of weights")
    weights = column.astype(np.float64)
    wrong = train[~(np.isfinite(weights[train]) & (weights[train] >= 0))]
    if wrong.size:
        more = f", and those of {wrong.size - 1:,} more samples are none" if wrong.size > 1 else ""
        text = f"{name}: the weight of sample {wrong[0]} is {weights[wrong[0]]:g}{more}"
        raise ConfigError.at(key, text, "weights are finite numbers of at least 0")
    if not weights[train].any():
        raise ConfigError.at(key, f"{name}: all {train.size:,} training samples have the weight 0")
    return weights
