"""Training and held-out samples of one source: its splits, and how the training samples are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import xxhash

from instar.config.errors import ConfigError
from instar.config.schema import SamplesConfig
from instar.data.columns import Columns
from instar.data.order import Int64Array, Order, order_of
from instar.data.sampling import DrawRule, Draws
from instar.data.source import (
    CostedSource,
    Measure,
    Source,
    WorkerSource,
    check_indices,
    close,
    measure_of,
)
from instar.data.split import HELD_OUT, UNUSED, check_division, subset_remark
from instar.data.user_source import examples_of, transform_source


@dataclass(frozen=True, eq=False)
class Subset:
    """Selected samples of a source: sample i is the source's sample `numbers[i]`.

    `Subset` does not close the source, which may be shared.
    """

    source: Source
    numbers: Int64Array

    @cached_property
    def fingerprint(self) -> str:
        return f"{self.source.fingerprint}/{_digest(self.numbers)}"

    @property
    def measure(self) -> Measure | None:
        return measure_of(self.source)

    def __len__(self) -> int:
        return self.numbers.size

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        """Return the samples. Raises IndexError outside 0 … len-1."""
        check_indices(indices, len(self))
        return self.source.read(self.numbers[indices], epoch)

    def weights(self, indices: Int64Array) -> float:
        return self.source.weights(self.numbers[indices])


class _DrawnSubset(Subset):
    """A subset whose indices count draws, and which reads them as draws of the source's samples; see `Draws`."""

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        return self.source.read(self._of_source(indices), epoch)

    def weights(self, indices: Int64Array) -> float:
        return self.source.weights(self._of_source(indices))

    def _of_source(self, draws: Int64Array) -> Int64Array:
        place, sample = np.divmod(draws, len(self))
        numbers: Int64Array = self.numbers[sample] + place * len(self.source)
        return numbers


@dataclass(frozen=True, eq=False)
class SampleSet:
    """Training and held-out samples of one source.

    Raises ValueError if a sample of the source is in no split, or in two.
    """

    source: Source
    """Pickled for worker processes, if the config has any."""
    splits: Mapping[str, Int64Array]
    """The samples of train, val and test, each ascending, and those that none of them has."""
    data: SamplesConfig
    costs: Int64Array | None = None
    """The cost of each sample of the source, if costs differ."""
    measure: Measure | None = None
    """The weights of transformed samples; None: each has weight 1."""
    sampling: DrawRule | None = None
    """How training samples are drawn; None: each once an epoch."""

    def __post_init__(self) -> None:
        check_division(self.splits, len(self.source))

    @cached_property
    def fingerprint(self) -> str:
        """Content hash of the samples, of the splits, and of how samples are drawn."""
        digests = [f"{name}/{_digest(numbers)}" for name, numbers in sorted(self.splits.items())]
        digests += [] if self.sampling is None else [self.sampling.fingerprint]
        return xxhash.xxh3_128_hexdigest("\n".join([self.source.fingerprint, *digests]).encode())

    @property
    def drawing(self) -> str:
        """Which training samples are drawn and how, in words; empty: all, each once an epoch."""
        texts, train = [], self.splits["train"]
        if (size := self.data.train_subset) is not None and UNUSED in self.splits:
            total = train.size + self.splits[UNUSED].size
            texts.append(subset_remark(size, train.size, total, "samples"))
        texts += [] if self.sampling is None else [self.sampling.describe(train)]
        return "; ".join(texts)

    def size(self, split: str) -> int:
        """Return the number of samples of a split."""
        return self.splits[split].size if split in self.splits else 0

    def train(self, seed: int) -> tuple[Source, Order]:
        """Return the training samples and their order."""
        numbers = self.splits["train"]
        has_draws = self.sampling is not None or self.data.order == "random"
        draws_of = len(self.source) if has_draws else None
        open_source = partial(
            _to_train_on, self.source, numbers, self.data, seed, self.measure, draws_of
        )
        source: Source = (
            WorkerSource(open_source, self.data.workers) if self.data.workers else open_source()
        )
        if self.costs is not None:
            source = CostedSource(source, self.costs[numbers])
        if self.sampling is None:
            order = order_of(self.data, numbers.size, seed)
        else:
            order = self.sampling.order(numbers, seed)
        tells_draws = has_draws and self.data.transform is not None
        return source, Draws(order, numbers.size) if tells_draws else order

    def held_out(self, split: str) -> Source:
        """Return a held-out split, untransformed.

        Raises ConfigError if there is no such split or it is empty.
        """
        if split not in HELD_OUT:
            raise ConfigError.at(
                "data", f"there is no split {split!r} that is held out", "use val or test"
            )
        if not self.size(split):
            key, hint = f"data.{split}", "to a share, a count, or a file of sample numbers"
            raise ConfigError.at(key, f"the {split} split is empty", f"set {key} {hint}")
        return Subset(self.source, self.splits[split])

    def close(self) -> None:
        """Close the source, which all splits share."""
        close(self.source)


def _to_train_on(
    source: Source,
    numbers: Int64Array,
    data: SamplesConfig,
    seed: int,
    measure: Measure | None,
    draws_of: int | None,
) -> Source:
    # random numbers depend on a sample's index in the source, not on its position in the split
    examples = partial(examples_of, source, numbers)
    transformed = transform_source(source, data, seed, measure, draws_of, examples)
    is_of_draws = draws_of is not None and data.transform is not None
    return _DrawnSubset(transformed, numbers) if is_of_draws else Subset(transformed, numbers)


def _digest(numbers: Int64Array) -> str:
    return xxhash.xxh3_128_hexdigest(numbers.astype("<i8").tobytes())
