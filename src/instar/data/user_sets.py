"""Sets of a user's samples: split as the config says, by themselves, or with a stream to train on.

A stream is an iterable that is read from its beginning at every pass. Its order, the cache of recent samples and
the search for its end are those of streams of text: it is one lane, without points at which reading could begin.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, cast

import numpy as np
import xxhash

from instar.config.errors import ConfigError
from instar.config.schema import SamplesConfig
from instar.data.columns import Columns, Ragged, difference, make_ragged, ragged_names, stack
from instar.data.mixture import Concatenated
from instar.data.order import Int64Array, Order
from instar.data.sample_set import SampleSet
from instar.data.sampling import classes_of, sampling_of
from instar.data.source import InMemorySource, Source, WrappedSource, close
from instar.data.split import UNUSED, divide_folds, divide_samples, subset_of
from instar.data.text.streams.reader import LaneReader
from instar.data.text.streams.samples import Note, SampleStream, StreamChanged
from instar.data.text.streams.seek_points import START, SeekPoint, SeekPoints
from instar.data.text.streams.source import LaneOrder, LaneSamples, OpenStreamSource
from instar.data.torch_loader import loader_weights
from instar.data.user_source import (
    as_source,
    data_set,
    graph_columns,
    graph_sample,
    is_graph,
    is_iterable,
    of_whole_graph,
    sample_of,
    transform_source,
)

SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Names that data sets of splits may have, and the split that each means."""
_COMPARED = 64
"""The number of first samples that are compared at every pass."""
_KEPT = 256
"""The least number of samples that are kept."""

Item = tuple[int, Mapping[str, Any]]
"""A number within the pass, and a sample: arrays by name."""


def sample_set(
    make: Callable[[], object], value: object, fields: Sequence[str], data: SamplesConfig, seed: int
) -> SampleSet | StreamedSet:
    """Return the samples that a user's function gives, as one set or one for each split.

    Args:
        make: the function, called again where what it returns can be read only once.

    Raises:
        ConfigError: the config cannot split them.
        ValueError: they cannot be used; says why.
    """
    parts = splits_of(value)
    if parts is None:
        source = _check_unweighted(as_source(value, fields), data)
        splits = split_samples(source, data, seed)
        sampling = sampling_of(source, splits["train"], data, loader_weights(value))
        return SampleSet(source, splits, data, sampling=sampling)
    of_loader = loader_weights(parts["train"])
    train = data_set(parts.pop("train"))
    for name, part in parts.items():
        if loader_weights(part) is not None:
            text = f"the {name} split's DataLoader draws by weights, and held-out samples are evaluated once each"
            raise ValueError(f"{text}; return its data set")
    held_out = {name: _part(name, part, fields) for name, part in parts.items()}
    if _is_read_forward(train):
        stream = IterableStream(_passes(make, train), fields)
        held_out, stream.ragged = _alike(held_out, stream.ragged)
        return StreamedSet(stream, held_out, data)
    sources = {"train": _check_unweighted(_part("train", train, fields), data), **held_out}
    first = {name: source.read(np.zeros(1, np.int64)) for name, source in sources.items()}
    for name, columns in first.items():
        if mismatch := difference(first["train"], columns):
            raise ValueError(f"{name} has {mismatch} as in train")
    sources, _ = _alike(sources)
    names = [f"the {name} split" for name in sources]
    concatenation = Concatenated([*sources.values()], names)
    ends = dict(zip(sources, concatenation.offsets[1:].tolist(), strict=True))
    members = {n: np.arange(ends[n] - len(part), ends[n]) for n, part in held_out.items()}
    splits = split_samples(concatenation, data, seed, members)
    sampling = sampling_of(concatenation, splits["train"], data, of_loader)
    return SampleSet(concatenation, splits, data, sampling=sampling)


class _RaggedSource(WrappedSource):
    """A source of which some columns are ragged as in another split, also where its own samples are of one size."""

    def __init__(self, source: Source, names: frozenset[str]) -> None:
        self.source, self._names = source, names

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        return make_ragged(self.source.read(indices, epoch), self._names)


def _alike(
    sources: Mapping[str, Source], ragged: frozenset[str] = frozenset()
) -> tuple[dict[str, Source], frozenset[str]]:
    """Return the splits with the same columns ragged in all of them, which are in one, and these columns."""
    of_split = {n: ragged_names(s.read(np.zeros(1, np.int64))) for n, s in sources.items()}
    ragged = ragged.union(*of_split.values())
    alike = {
        name: source if of_split[name] == ragged else _RaggedSource(source, ragged)
        for name, source in sources.items()
    }
    return alike, ragged


def _check_unweighted(source: Source, data: SamplesConfig) -> Source:
    """Return the source. Raises ConfigError if it weighs samples itself, whose weights a transform may change."""
    if data.transform is not None and source.weights(np.arange(len(source))) != len(source):
        raise ConfigError.at(
            "data.transform",
            "data.transform may change the weights of samples, which this source gives itself",
            "transform in its read, and give the weights of what that returns",
        )
    return source


def splits_of(value: object) -> dict[str, object] | None:
    """Return the data set of each split if that is what the value is, in the order of `HELD_OUT`.

    Raises:
        ValueError: data sets have other names than those of splits, or two mean the same one.
    """
    if not isinstance(value, Mapping) or "train" not in value:
        return None
    unknown = [str(name) for name in value if name not in SPLITS]
    if unknown and isinstance(value["train"], list | tuple | Ragged | np.ndarray):
        return None  # columns, one of which has the name of a split
    if unknown:
        raise ValueError(
            f"a data set {', '.join(unknown)} besides train; splits are train, val (or validation) and test"
        )
    data_set_of = {SPLITS[name]: data_set for name, data_set in value.items()}
    if len(data_set_of) < len(value):
        raise ValueError(f"{', '.join(value)}: two of these are the same split")
    return {name: data_set_of[name] for name in ("train", "val", "test") if name in data_set_of}


def _part(name: str, data_set: object, fields: Sequence[str]) -> Source:
    try:
        return as_source(data_set, fields)
    except Exception as error:
        error.add_note(f"in the {name} split")
        raise


def _is_read_forward(train: object) -> bool:
    return is_iterable(train) or (callable(train) and not hasattr(train, "__getitem__"))


def _passes(make: Callable[[], object], train: Any) -> Callable[[], Iterable[Any]]:
    """Return a function that begins a pass over training samples."""
    if isinstance(train, Iterator):  # which gives its items once
        return lambda: cast(dict[str, Any], splits_of(make()))["train"]
    return train if callable(train) and not is_iterable(train) else lambda: train


def split_samples(
    source: Source,
    data: SamplesConfig,
    seed: int,
    split_members: Mapping[str, Int64Array] | None = None,
) -> dict[str, Int64Array]:
    """Split the samples as the config's section `data` says.

    Args:
        split_members: samples of held-out splits that are not drawn.

    Returns:
        the sample numbers of each split, by name.

    Raises:
        ConfigError: the split is impossible, or there is no column `data.stratify` of classes.
    """
    name = data.stratify
    classes = None if name is None else classes_of(source, name, "data.stratify")
    sizes = {"val": data.val, "test": data.test, **(split_members or {})}
    if data.folds is None:
        splits = dict(divide_samples(len(source), **sizes, seed=seed, classes=classes))
    elif "val" in (split_members or {}):
        message = "data.folds draws the validation split, and the samples come with one"
        raise ConfigError.at("data.folds", message, "leave data.folds out, or return no val split")
    else:
        folds = divide_folds(
            len(source), data.fold, data.folds, **sizes, seed=seed, classes=classes
        )
        splits = dict(folds)
    if (size := data.train_subset) is not None:
        train = splits["train"]
        of_train = None if classes is None else classes[train]
        chosen = subset_of(train.size, size, seed, "samples", of_train)
        splits |= {"train": train[chosen], UNUSED: np.delete(train, chosen)}
    return splits


class IterableStream(SampleStream):
    """The items of an iterable as one lane of samples.

    Args:
        begin: returns the iterable of a pass; it must give the same items at every call.
        fields: names for the parts of items that are tuples.

    Raises:
        ValueError: an item cannot be used, or there are none.
    """

    lanes, unit = 1, "samples"

    def __init__(self, begin: Callable[[], Iterable[Any]], fields: Sequence[str]) -> None:
        self._begin, self._fields = begin, tuple(fields)
        items = list(islice(begin(), _COMPARED))
        if not items:
            raise ValueError("there are no samples")
        first = list(self._convert(items))
        samples = [sample for _, sample in first]
        self._of_graph = of_whole_graph(samples) if is_graph(items[0]) else None
        self.ragged = ragged_names(self._stack(first))
        self._examples = first
        self._first = [self._digest(sample) for sample in first]
        self.fingerprint = xxhash.xxh3_128_hexdigest("\n".join(self._first).encode())

    def open(
        self,
        lane: int,  # noqa: ARG002
        seek: SeekPoint = START,  # noqa: ARG002
        note: Note = lambda _: None,  # noqa: ARG002
    ) -> Generator[Item, None, int]:
        """See `SampleStream`.

        Raises:
            StreamChanged: one of the first items is another one than before.
        """
        number = 0
        for number, sample in enumerate(self._convert(self._begin()), 1):
            if number <= len(self._first) and self._digest(sample) != self._first[number - 1]:
                raise StreamChanged(
                    f"item {number - 1} is not what it was when the iterable was read before; it must "
                    "give the same items in the same order every time: seed it with self.seed, and "
                    "leave shuffling to data.order"
                )
            yield sample
        return number

    def weight_of(self, sample: Item) -> float:  # noqa: ARG002
        return 1.0

    def columns(self, samples: Sequence[Item]) -> Columns:
        return self._stack(samples, self.ragged)

    def examples(self) -> Iterator[tuple[int, Columns]]:
        """Yield the first samples one by one: their numbers and columns."""
        return ((item[0], self.columns([item])) for item in self._examples)

    def measure(self, lane: int, note: Note) -> int:
        return sum(1 for _ in self.open(lane, START, note))

    def _convert(self, items: Iterable[object]) -> Iterator[Item]:
        number = 0
        try:
            for item in items:
                graph = is_graph(item)
                sample = graph_sample(item) if graph else sample_of(number, item, self._fields)
                yield number, sample
                number += 1
        except Exception as error:
            error.add_note(f"after {number:,} items of the iterable")
            raise

    def _stack(self, samples: Sequence[Item], ragged: frozenset[str] | None = None) -> Columns:
        numbers, items = zip(*samples, strict=True)
        if self._of_graph is not None:
            return graph_columns(items, self._of_graph, numbers)
        return stack(items, numbers, ragged)

    def _digest(self, sample: Item) -> str:
        return InMemorySource(self._stack([sample])).fingerprint


class _ItemSource(OpenStreamSource):
    """Samples of a stream, each of weight 1, which is known without reading them."""

    def weights(self, indices: Int64Array) -> float:
        return float(indices.size)


@dataclass(frozen=True)
class _OneLane:
    """The order of a stream of which every rank reads all samples and uses its own."""

    lane: LaneOrder

    @property
    def samples_per_epoch(self) -> int:
        return self.lane.samples_per_epoch

    def indices(self, epoch: int, start: int, stop: int) -> Int64Array:
        return self.lane.indices(epoch, start, stop)

    def explore(self, start: int, stop: int) -> None:
        self.lane.explore(start, stop)


@dataclass(frozen=True, eq=False)
class StreamedSet:
    """Training samples of a stream, and held-out samples of other sources.

    Raises:
        ConfigError: the config asks for what a stream cannot do, or val is missing.
    """

    stream: IterableStream
    held_out_sources: Mapping[str, Source]
    data: SamplesConfig

    def __post_init__(self) -> None:
        data = self.data
        if data.order in ("random", "blocks"):
            raise ConfigError.at(
                "data.order",
                f"data.order {data.order} needs random access, and an iterable is read from its beginning",
                "sequential, or shuffled within data.shuffle_window",
            )
        if data.workers:
            raise ConfigError.at(
                "data.workers", "an iterable is read by one process", "set data.workers: 0"
            )
        if data.folds is not None:
            message = "data.folds divides samples, and an iterable is read forward"
            raise ConfigError.at(
                "data.folds", message, "return all samples in place of an iterable"
            )
        if data.stratify is not None:
            raise ConfigError.at(
                "data.stratify", "splits of an iterable are given, not drawn", "leave it out"
            )
        for key in ("balance", "sample_weights", "train_subset"):
            if getattr(data, key) is not None:
                text = f"data.{key} needs random access, and an iterable is read from its beginning"
                raise ConfigError.at(
                    f"data.{key}", text, "leave it out, or return samples with an index"
                )

    @cached_property
    def fingerprint(self) -> str:
        """Content hash of the first training samples and of all held-out ones."""
        fingerprints = [
            f"{name}/{source.fingerprint}" for name, source in sorted(self.held_out_sources.items())
        ]
        lines = [self.stream.fingerprint, *fingerprints]
        return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())

    @property
    def drawing(self) -> str:
        """Empty: each sample comes once a pass."""
        return ""

    def size(self, split: str) -> int | None:
        """Return the number of samples of a split; None if unknown."""
        return None if split == "train" else len(self.held_out_sources.get(split, ()))

    def train(self, seed: int) -> tuple[Source, Order]:
        """Return the training samples and their order, whose end is found by reading."""
        window = 1 if self.data.order == "sequential" else self.data.shuffle_window
        lanes = LaneReader(self.stream, SeekPoints(None, self.stream.fingerprint, 1))
        samples = LaneSamples(self.stream, lanes, [None], max(_KEPT, 2 * window), window)
        order = LaneOrder([None], seed, window)
        items = _ItemSource(samples, order)
        source = transform_source(items, self.data, seed, examples=self.stream.examples)
        return source, _OneLane(order)

    def held_out(self, split: str) -> Source:
        """Return a held-out split.

        Raises ConfigError if there is no such split.
        """
        if split not in self.held_out_sources:
            raise ConfigError.at(
                f"data.{split}",
                f"samples() gives no {split} split, which cannot be drawn from an iterable",
                f'return {{"train": iterable, "{split}": …}}',
            )
        return self.held_out_sources[split]

    def close(self) -> None:
        for source in self.held_out_sources.values():
            close(source)
