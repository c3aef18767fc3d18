"""What a run trains on and is judged by, whatever kind of data its config names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import xxhash

from instar.config.language import DataConfig
from instar.config.named import load_named
from instar.data.blocks import order_of
from instar.data.counting import check_stream, count_lanes, open_stream
from instar.data.heldout import prepare_held_out
from instar.data.mixture import Concatenated, mixture_order
from instar.data.order import Order, make_order
from instar.data.prepare import default_path, parameters, prepare
from instar.data.rows import RowsDataset, open_rows, prepare_rows
from instar.data.source import Source, TokenWindows
from instar.data.tokens import TokenDataset, open_dataset
from instar.data.transform import transformed
from instar.data.workers import WorkerSource

Say = Callable[[str], None]


class DataSet(Protocol):
    """Samples to train on, and held-out ones, cut to any length."""

    @property
    def path(self) -> Path:
        """A folder with the tokenizer."""
        ...

    @property
    def vocab_size(self) -> int: ...
    @property
    def tokenizer_fingerprint(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...

    def train_samples(self, context: int) -> int | None:
        """How many samples there are to train on, None where nobody has counted them."""
        ...

    def train_tokens(self, context: int) -> int | None:
        """The tokens of a text that makes as many samples."""
        ...

    def train(self, context: int, seed: int) -> tuple[Source, Order]:
        """Samples of `context` tokens, and the order in which they come.

        Raises ConfigError where there are too few tokens for one.
        """
        ...

    def held_out(self, split: str, context: int) -> Source:
        """Samples that are never trained on.

        Raises ConfigError where there is no such split, or too few tokens.
        """
        ...


def prepare_data(
    data: DataConfig, seed: int, world_size: int = 1, say: Say = lambda _: None
) -> None:
    """Make what must be there before a data set can be opened; one process does this for all.

    Raises ConfigError where it cannot be made, or was made otherwise than the config says.
    """
    for part in _parts(data, seed):
        if part.kind == "tokens":
            prepare(part, seed, say=say)
        elif part.kind == "rows":
            prepare_rows(part, seed, say=say)
        else:
            folder = prepare_held_out(part, seed, say=say)
            if _counted(part, world_size):
                count_lanes(part, folder, say)
            else:
                check_stream(part, folder)
    if data.transform is not None:
        load_named(data.transform, key="data.transform")


def open_data(data: DataConfig, seed: int, world_size: int = 1) -> DataSet:
    """Open what `prepare_data` has made, without reading samples.

    Raises ConfigError where anything is missing or is not what the config says.
    """
    if data.mixture:
        return Mixture(data, tuple(_open_tokens(part, seed) for part in _parts(data, seed)))
    if data.kind in ("stream", "python"):
        folder = data.path or default_path(data, seed)
        return Stream(data, open_dataset(folder), _counted(data, world_size))
    return _open_tokens(data, seed)


def folders(data: DataConfig, seed: int) -> list[Path]:
    """Where `prepare_data` puts what it makes."""
    return [Path(part.path or default_path(part, seed)) for part in _parts(data, seed)]


@dataclass(frozen=True, eq=False)
class Folder:
    """What a folder of data says of itself: the tokenizer, and what is held out."""

    data: DataConfig
    dataset: TokenDataset | RowsDataset

    @property
    def path(self) -> Path:
        return self.dataset.path

    @property
    def vocab_size(self) -> int:
        return self.dataset.vocab_size

    @property
    def tokenizer_fingerprint(self) -> str:
        return self.dataset.tokenizer_fingerprint

    def held_out(self, split: str, context: int) -> Source:
        return TokenWindows(self.dataset.split(split), context)


@dataclass(frozen=True, eq=False)
class Tokens(Folder):
    """Token shards, or rows of a Hugging Face data set: what can be read at any place."""

    seed: int

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    def train_samples(self, context: int) -> int:
        return len(self.samples(context, self.seed)[0])

    def train_tokens(self, context: int) -> int:
        if self.data.packing:
            return len(self.dataset.split("train"))
        return self.train_samples(context) * context + 1

    def train(self, context: int, seed: int) -> tuple[Source, Order]:
        source, order = self.samples(context, seed)
        return hosted(
            transformed(source, self.data, seed), self.data, self.seed, context, seed
        ), order

    def samples(self, context: int, seed: int) -> tuple[Source, Order]:
        """As they are, before anything is done to them."""
        data = self.data
        if not data.packing and isinstance(self.dataset, RowsDataset):
            documents = self.dataset.samples(context)
            return documents, order_of(data, len(documents), seed)
        split = self.dataset.split("train")
        windows = TokenWindows(split, context)
        if data.order != "random":
            return windows, order_of(data, len(windows), seed)
        starts = TokenWindows(split, context, stride=1)
        return starts, make_order("random", len(starts), seed, samples_per_epoch=len(windows))


@dataclass(frozen=True, eq=False)
class Mixture:
    """Several sources, each drawn from in its share; held out is what each part holds out."""

    data: DataConfig
    parts: tuple[Tokens, ...]

    @property
    def path(self) -> Path:
        return self.parts[0].path

    @property
    def vocab_size(self) -> int:
        return self.parts[0].vocab_size

    @property
    def tokenizer_fingerprint(self) -> str:
        return self.parts[0].tokenizer_fingerprint

    @property
    def fingerprint(self) -> str:
        told = [f"{part.fingerprint}/{weight}" for part, weight in self._weighed()]
        return xxhash.xxh3_128_hexdigest("\n".join(told).encode())

    def train_samples(self, context: int) -> int:
        return sum(part.train_samples(context) for part in self.parts)

    def train_tokens(self, context: int) -> int:
        return self.train_samples(context) * context + 1

    def train(self, context: int, seed: int) -> tuple[Source, Order]:
        sources = [part.samples(context, seed)[0] for part in self.parts]
        weights = [part.weight for part in self.data.mixture if part.weight is not None]
        order = mixture_order(
            partial(order_of, self.data), [len(source) for source in sources], weights or None, seed
        )
        whole = transformed(Concatenated(sources), self.data, seed)
        return hosted(whole, self.data, self.parts[0].seed, context, seed), order

    def held_out(self, split: str, context: int) -> Source:
        # a text of its own is the same for every part
        parts = self.parts if self.data.val_source is None else self.parts[:1]
        return Concatenated([part.held_out(split, context) for part in parts])

    def _weighed(self) -> zip[tuple[Tokens, float | None]]:
        return zip(self.parts, (part.weight for part in self.data.mixture), strict=True)


@dataclass(frozen=True, eq=False)
class Stream(Folder):
    """What is read from its beginning; what is held out are token shards."""

    counted: bool
    """whether the lanes were counted, so that each rank can read its own"""

    @property
    def fingerprint(self) -> str:
        """Of what is held out and of what the config says; a stream is not read to know it."""
        told = [self.dataset.fingerprint, *map(str, parameters(self.data, 0).items())]
        return xxhash.xxh3_128_hexdigest("\n".join(told).encode())

    def train_samples(self, context: int) -> None:  # noqa: ARG002
        return None

    def train_tokens(self, context: int) -> None:  # noqa: ARG002
        return None

    def train(self, context: int, seed: int) -> tuple[Source, Order]:
        source, order = open_stream(self.data, self.path, context, seed, counted=self.counted)
        return transformed(source, self.data, seed), order


def hosted(source: Source, data: DataConfig, seed: int, context: int, order_seed: int) -> Source:
    """The source, read by worker processes if there are any."""
    if not data.workers:
        return source
    alone = data.model_copy(update={"workers": 0})
    return WorkerSource(partial(_source, alone, seed, context, order_seed), data.workers)


def _source(data: DataConfig, seed: int, context: int, order_seed: int) -> Source:
    """A worker's own."""
    return open_data(data, seed).train(context, order_seed)[0]


def _open_tokens(data: DataConfig, seed: int) -> Tokens:
    if data.kind == "rows":
        return Tokens(data, open_rows(data, seed), seed)
    return Tokens(data, open_dataset(data.path or default_path(data, seed)), seed)


def _parts(data: DataConfig, seed: int) -> list[DataConfig]:
    """Each source with its own folder."""
    if not data.mixture:
        return [data]
    parts = []
    for number, part in enumerate(data.mixture):
        fields = {
            "source": part.source,
            "text_field": part.text_field or data.text_field,
            "tokens_field": part.tokens_field or data.tokens_field,
            "mixture": (),
        }
        own = data.model_copy(update=fields)
        path = f"{data.path}/{number}" if data.path else default_path(own, seed)
        parts.append(own.model_copy(update={"path": path}))
    return parts


def _counted(data: DataConfig, world_size: int) -> bool:
    return data.kind == "stream" and data.strategy == "sharded" and world_size > 1
