"""Training and held-out samples of a language-model config, for every `data.kind`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import xxhash

from instar.config.errors import ConfigError, ConfigProblem
from instar.config.language import DataConfig, part_names
from instar.config.schema import EvalSet
from instar.config.user_code.failures import what_happened
from instar.config.user_code.named import load_named
from instar.data.mixture import Concatenated, Mixed, mixture_order
from instar.data.order import Order, make_order, order_of
from instar.data.sampling import Draws
from instar.data.source import DocumentSamples, Source, TokenWindows, WorkerSource
from instar.data.text.chat import MARKS, ChatSamples, conversation_sizes
from instar.data.text.documents import open_rows
from instar.data.text.files import STDLIB, find_files
from instar.data.text.foreign.token_files import holds_ids
from instar.data.text.origin import default_path, parameters, preparation_files
from instar.data.text.prepare import prepare_dataset, settle_folder
from instar.data.text.selection import TrainingText, training_text
from instar.data.text.shards import TokenDataset, open_dataset
from instar.data.text.targets import (
    DocumentEdge,
    SeparateDocuments,
    TargetCount,
    TokenTargets,
    at_most,
    count_targets,
    mean_target_count,
)
from instar.data.text.tokenizer import (
    TOKENIZER_FILE,
    end_of_document,
    load_saved_tokenizer,
    separator_of,
)
from instar.data.text.verify import verify_changed
from instar.data.user_source import transform_source

Say = Callable[[str], None]


def create_dataset_files(
    data: DataConfig,
    seed: int,
    world_size: int = 1,
    say: Say = lambda _: None,
    sets: Sequence[EvalSet] = (),
) -> None:
    """Create all files that opening the data set and these held-out sets requires; one process does this for all ranks.

    Raises ConfigError if that fails, or existing files were made with another config.
    """
    for number, part in enumerate(_parts(data)):
        with _of_part(data, number):
            folder = prepare_dataset(part, seed, say=say)
            if part.read_from_start:
                _check_stream(part, folder, world_size, say)
            verify_changed(folder)
    for number, entry in enumerate(sets):
        with _of_set(number):
            _say_overlap(data, entry, say)
            set_data = _set_data(data, seed, entry)
            folder = prepare_dataset(set_data, seed, say=say, held_out=True)
            verify_changed(folder)
    if data.transform is not None:
        load_named(data.transform, key="data.transform")


def _say_overlap(data: DataConfig, entry: EvalSet, say: Say) -> None:
    """Say how many files of a held-out set are those of a source, too."""
    held_out = _files_of(entry.source)
    for source in [part.source for part in data.mixture] or [data.source]:
        if source is not None and (count := len(held_out & _files_of(source))):
            say(
                f"warning: {count:,} of {len(held_out):,} files of eval.sets {entry.name} are files of {source} too: "
                "their text is trained on"
            )


def _files_of(source: str) -> set[Path]:
    """Return the files of a source; none of the standard library, or of what only its reader finds."""
    try:
        return set() if source == STDLIB else {file.resolve() for file in find_files(source).files}
    except ConfigError:
        return set()


def _check_stream(data: DataConfig, folder: Path, world_size: int, say: Say) -> None:
    # most trainings have no stream, and start sooner without its modules
    from instar.data.text.streams.index import check_stream, count_lanes

    if _counts_lanes(data, world_size):
        count_lanes(data, folder, say)
    else:
        check_stream(data, folder)


def open_sets(data: DataConfig, seed: int, sets: Sequence[EvalSet]) -> dict[str, TokenDataset]:
    """Open held-out sets by name, which `create_dataset_files` has created."""
    opened = {}
    for number, entry in enumerate(sets):
        with _of_set(number):
            set_data = _set_data(data, seed, entry)
            opened[entry.name] = open_dataset(default_path(set_data, seed, held_out=True))
    return opened


def _set_data(data: DataConfig, seed: int, entry: EvalSet) -> DataConfig:
    """Return the config of a held-out set's data, which have the tokens of the run's."""
    folder = folders(data, seed)[0]
    fields = {
        "kind": "tokens",
        "source": entry.source,
        "text_field": entry.text_field or data.text_field,
        "tokenizer": "byte" if data.tokenizer == "byte" else str(folder / TOKENIZER_FILE),
        **dict.fromkeys(("bos", "eos", "subset", "val_source", "tokens_field", "max_bytes"), None),
        **{"mixture": (), "source_split": "train", "drop_duplicates": False, "path": None},
    }
    return data.model_copy(update=fields)


@contextmanager
def _of_set(number: int) -> Iterator[None]:
    """Say of errors of a data set that it is that of a held-out set."""
    try:
        yield
    except ConfigError as error:
        key = f"eval.sets[{number}].source"
        problem = error.problems[0]
        raise ConfigError.at(key, problem.message, problem.hint) from None


@contextmanager
def _of_part(data: DataConfig, number: int) -> Iterator[None]:
    """Say of errors of a source which of a mixture it is."""
    try:
        yield
    except ConfigError as error:
        if not data.mixture:
            raise
        raise ConfigError(
            *(_problem_of_part(problem, number) for problem in error.problems)
        ) from None


def _problem_of_part(problem: ConfigProblem, number: int) -> ConfigProblem:
    name = problem.key.removeprefix("data.")
    if name not in ("source", "text_field", "tokens_field"):
        return problem
    key = f"data.mixture[{number}].{name}"
    # a line of a file stays the place
    place = key if problem.place in ("", problem.key) else problem.place
    return replace(problem, keys=(key,), place=place)


def missing(
    data: DataConfig, seed: int, say: Say = lambda _: None, sets: Sequence[EvalSet] = ()
) -> list[Path]:
    """Return the folders that `create_dataset_files` would create, without creating them.

    Raises ConfigError if a folder holds something else, or there is no source to create it from.
    """
    absent = []
    for number, part in enumerate(_parts(data)):
        with _of_part(data, number):
            folder, is_complete = settle_folder(part, seed, say)
            if is_complete:
                continue
            absent.append(folder)
            preparation_files(part)  # which must be there
    for number, entry in enumerate(sets):
        with _of_set(number):
            set_data = _set_data(data, seed, entry)
            if entry.source != STDLIB:
                find_files(entry.source)
            folder = Path(default_path(set_data, seed, held_out=True))
            is_complete = False
            if not absent:  # else there is no tokenizer yet
                folder, is_complete = settle_folder(set_data, seed, say, held_out=True)
            if not is_complete:
                absent.append(folder)
    return absent


def open_data(data: DataConfig, seed: int, world_size: int = 1) -> DataSet:
    """Open the data set that `create_dataset_files` has created, without reading samples.

    Raises ConfigError if anything is missing or does not match the config.
    """
    opened = _opened(data, seed, world_size)
    if data.document_masks and data.kind != "chat":
        _ = opened.document_edges  # which are looked for before a run starts
    return opened


def _opened(data: DataConfig, seed: int, world_size: int) -> DataSet:
    if data.mixture:
        parts = tuple(_open_tokens(part, seed) for part in _parts(data))
        return MixtureData(data, seed, parts[0].dataset, parts)
    if data.read_from_start:
        folder = data.path or default_path(data, seed)
        return StreamData(data, seed, open_dataset(folder), _counts_lanes(data, world_size))
    if data.kind == "chat":
        folder = data.path or default_path(data, seed)
        return ChatData(data, seed, open_dataset(folder), open_dataset(Path(folder) / MARKS))
    return _open_tokens(data, seed)


def lost_conversations(data: DataConfig, seed: int, context: int) -> list[str]:
    """Return in words which conversations of prepared data do not fit into the context, for each split."""
    data_set = open_data(data, seed)
    if not isinstance(data_set, ChatData):
        return []
    samples = (data_set.samples(split, context) for split in data_set.dataset.splits)
    return [source.remark for source in samples if source.remark]


def folders(data: DataConfig, seed: int) -> list[Path]:
    """Return the folders that `create_dataset_files` writes to."""
    return [Path(part.path or default_path(part, seed)) for part in _parts(data)]


_LOOKED_AT = 1 << 22
"""tokens in which an end of a document must be"""


def _no_edge(text: str, hint: str) -> ConfigError:
    message = f"{text}, so that nothing says where the next one begins"
    return ConfigError.at("data.document_masks", message, hint)


@dataclass(frozen=True, eq=False)
class DataSet(ABC):
    """Training and held-out samples with any context length, and the tokenizer of their text."""

    data: DataConfig
    seed: int
    dataset: TokenDataset
    """the shards whose folder holds the tokenizer"""

    @property
    def path(self) -> Path:
        """The folder that holds the tokenizer."""
        return self.dataset.path

    @property
    def vocab_size(self) -> int:
        return self.dataset.vocab_size

    @property
    def tokenizer_fingerprint(self) -> str:
        return self.dataset.tokenizer_fingerprint

    @property
    @abstractmethod
    def fingerprint(self) -> str: ...

    @property
    def drawing(self) -> str:
        """Which part of the training split is trained on, in words; empty: all."""
        return ""

    @abstractmethod
    def train_samples(self, context: int) -> int | None:
        """Return the number of training samples, None if they are not counted."""

    def train_tokens(self, context: int) -> int | None:
        """Return the tokens of a text that gives `train_samples`; None if not counted."""
        samples = self.train_samples(context)
        return None if samples is None else samples * context + 1

    @abstractmethod
    def train(self, context: int, seed: int) -> tuple[Source, Order]:
        """Return samples of `context` tokens, and their order.

        Raises ConfigError if there are too few tokens for one sample.
        """

    def held_out(self, split: str, context: int) -> Source:
        """Return a split that is never trained on.

        Raises ConfigError if there is no such split, or it has too few tokens.
        """
        return self.windows_of(self.dataset, split, context)

    def windows_of(self, dataset: TokenDataset, split: str, context: int) -> Source:
        """Return the text of a split of a data set, whose documents are separate if those of this one are."""
        windows = TokenWindows(dataset.split(split), context)
        if not self.data.document_masks:
            return windows
        # what is held out of a text has its form; what is named for it has its own
        named = dataset.source.get("val_source") if split == "val" else None
        edge = self._edge(
            dataset, named or dataset.source.get("source", ""), "val" if named else "train"
        )
        return SeparateDocuments(windows, (edge,), TokenTargets(context, self.vocab_size))

    def held_out_parts(self, context: int) -> dict[str, range]:  # noqa: ARG002
        """Return the samples of the validation split that are of each source of a mixture, by its name."""
        return {}

    def check_transform(self, context: int) -> None:
        """Raise ConfigError if `data.transform` fails on a training sample. A stream is not read for it."""
        if self.data.transform is None or (samples := self.train_source(context)) is None:
            return
        with self._transforming():
            self._transform(samples, context, 0).read(np.zeros(1, dtype=np.int64))

    def targets(self, context: int) -> TargetCount:
        """Return the targets of a training sample of `context` tokens, on the mean.

        Raises ConfigError if `data.transform` fails on one.
        """
        samples = self.train_source(context)
        if samples is None:
            return unread_targets(self.data, context)
        with self._transforming():
            return count_targets(self._transform(samples, context, 0), context)

    @contextmanager
    def _transforming(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            message = f"{self.data.transform}: {what_happened(error)}"
            raise ConfigError.at("data.transform", message) from error

    def train_source(self, context: int) -> Source | None:  # noqa: ARG002
        """Return the training samples before `data.transform`; None: they are read forward only."""
        return None

    def _transform(self, source: Source, context: int, seed: int) -> Source:
        targets = TokenTargets(context, self.vocab_size)
        # the sizes are those that the targets check, and a stream gives no examples
        draws_of = self._draws_of(source)
        source = transform_source(source, self.data, seed, targets, draws_of, examples=tuple)
        return self._separate(source, context)

    def _draws_of(self, samples: Source) -> int | None:  # noqa: ARG002
        """Return the number of samples whose draws the order tells apart for `data.transform`; None: it does not."""
        return None

    def _separate(self, source: Source, context: int) -> Source:
        """Return samples of this data set whose documents do not see each other, if `data.document_masks` says so."""
        if not self.data.document_masks:
            return source
        targets = TokenTargets(context, self.vocab_size)
        return SeparateDocuments(source, self.document_edges, targets, self._offsets(context))

    def _offsets(self, context: int) -> Sequence[int]:  # noqa: ARG002
        """Return the first training sample of each text."""
        return (0,)

    @cached_property
    def document_edges(self) -> tuple[DocumentEdge, ...]:
        """By which tokens documents of `data.document_masks` are told apart, in each text that is trained on.

        Raises:
            ConfigError: there is none, or the tokens do not have it.
        """
        return (self._edge(self.dataset, self.data.source),)

    def _edge(self, dataset: TokenDataset, source: str, split: str = "train") -> DocumentEdge:
        tokenizer = load_saved_tokenizer(self.path)
        end = end_of_document(tokenizer)
        are_ids = dataset.source.get("tokens_field") is not None or holds_ids(source)
        if end is None:
            hint = "" if are_ids else "name it in data.eos"
            raise _no_edge("no token of the tokenizer ends a document", hint)
        if not are_ids and end in tokenizer.before.tolist():
            message = "one token of the tokenizer begins and ends a document"
            raise _no_edge(message, "name another in data.bos or data.eos, or data.bos: ''")
        text = dataset.split(split if split in dataset.splits else "val")
        tokens = text.read(0, min(len(text), _LOOKED_AT))
        if not (tokens == end).any():
            message = f"the token {end}, which ends a document, is not among the first {tokens.size:,} tokens"
            raise _no_edge(message, "leave it out, or name the token in data.eos")
        # ids of others are used as they are
        return DocumentEdge(end, begins=are_ids and int(tokens[0]) == end)

    def _host(self, samples: Source, context: int, seed: int) -> Source:
        """Return samples after `data.transform`, read by worker processes if the config has any."""
        source = self._transform(samples, context, seed)
        if not self.data.workers:
            return source
        worker_data = self.data.model_copy(update={"workers": 0})
        open_source = partial(_open_source, worker_data, self.seed, context, seed)
        return WorkerSource(open_source, self.data.workers)


@dataclass(frozen=True, eq=False)
class TokenData(DataSet):
    """Token shards made from text or from rows."""

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    @cached_property
    def text(self) -> TrainingText:
        """What is trained on. Raises ConfigError as `training_text`."""
        split, sizes = self.dataset.split("train"), self.dataset.document_sizes
        return training_text(split, sizes, self.data, self.seed)

    @property
    def drawing(self) -> str:
        return self.text.remark

    def train_samples(self, context: int) -> int:
        return len(self.samples(context, self.seed)[0])

    def train_tokens(self, context: int) -> int | None:
        if self.data.packing:
            return len(self.text.split)
        return super().train_tokens(context)

    def train_source(self, context: int) -> Source:
        return self.samples(context, self.seed)[0]

    def train(self, context: int, seed: int) -> tuple[Source, Order]:
        samples, order = self.samples(context, seed)
        if self.data.transform is not None and self._draws_of(samples) is not None:
            order = Draws(order, len(samples))
        return self._host(samples, context, seed), order

    def _draws_of(self, samples: Source) -> int | None:
        return len(samples) if self.data.order == "random" else None

    def samples(self, context: int, seed: int) -> tuple[Source, Order]:
        """Return samples and order, without `data.transform` and without workers."""
        data = self.data
        split, sizes = self.text.split, self.text.document_sizes
        if not data.packing and sizes is not None:
            missing = int(sizes.sum()) - len(split)
            separator = separator_of(load_saved_tokenizer(self.path))[:missing]
            documents = DocumentSamples(split, sizes, separator, context)
            return documents, order_of(data, len(documents), seed)
        windows = TokenWindows(split, context)
        if data.order != "random":
            return windows, order_of(data, len(windows), seed)
        starts = TokenWindows(split, context, stride=1)
        return starts, make_order("random", len(starts), seed, samples_per_epoch=len(windows))


@dataclass(frozen=True, eq=False)
class MixtureData(DataSet):
    """Several sources, sampled by their shares; held-out splits concatenate those of the parts."""

    parts: tuple[TokenData, ...]

    @property
    def fingerprint(self) -> str:
        lines = [f"{part.fingerprint}/{weight}" for part, weight in self._weighted_parts()]
        return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())

    @property
    def drawing(self) -> str:
        return "; ".join(filter(None, (part.drawing for part in self.parts)))

    def train_samples(self, context: int) -> int:
        return sum(part.train_samples(context) for part in self.parts)

    def targets(self, context: int) -> TargetCount:
        parts = self._weighted_parts()
        shares = [p.train_samples(context) if weight is None else weight for p, weight in parts]
        return mean_target_count([part.targets(context) for part in self.parts], shares)

    def train_source(self, context: int) -> Source:
        return Concatenated([part.train_source(context) for part in self.parts])

    def train(self, context: int, seed: int) -> tuple[Source, Order]:
        sources = [part.samples(context, seed)[0] for part in self.parts]
        weights = [part.weight for part in self.data.mixture if part.weight is not None]
        order = mixture_order(
            partial(order_of, self.data), [*map(len, sources)], weights or None, seed
        )
        if isinstance(order, Mixed) and self.data.transform is not None:
            order = replace(order, tells_draws=True)
        return self._host(Concatenated(sources), context, seed), order

    def _draws_of(self, samples: Source) -> int | None:
        return None if None in (part.weight for part in self.data.mixture) else len(samples)

    @cached_property
    def document_edges(self) -> tuple[DocumentEdge, ...]:
        return tuple(edge for part in self.parts for edge in part.document_edges)

    def _offsets(self, context: int) -> Sequence[int]:
        sizes = [len(part.train_source(context)) for part in self.parts]
        return [0, *np.cumsum(sizes[:-1]).tolist()]

    def held_out(self, split: str, context: int) -> Source:
        # val_source is the same for all parts
        parts = self.parts if self.data.val_source is None else self.parts[:1]
        return Concatenated([part.held_out(split, context) for part in parts])

    def held_out_parts(self, context: int) -> dict[str, range]:
        if self.data.val_source is not None:
            return {}
        ends = np.cumsum([len(part.held_out("val", context)) for part in self.parts]).tolist()
        names = part_names(self.data.mixture)
        return dict(zip(names, map(range, [0, *ends[:-1]], ends), strict=True))

    def _weighted_parts(self) -> zip[tuple[TokenData, float | None]]:
        return zip(self.parts, (part.weight for part in self.data.mixture), strict=True)


@dataclass(frozen=True, eq=False)
class ChatData(DataSet):
    """Conversations, of which only the assistant's tokens are targets."""

    marks: TokenDataset
    """what each token is, see `chat`"""

    @property
    def fingerprint(self) -> str:
        text = f"{self.dataset.fingerprint}\n{self.marks.fingerprint}"
        return xxhash.xxh3_128_hexdigest(text.encode())

    def train_samples(self, context: int) -> int:
        return len(self.samples("train", context))

    def train_source(self, context: int) -> Source:
        return self.samples("train", context)

    def train(self, context: int, seed: int) -> tuple[Source, Order]:
        samples = self.samples("train", context)
        return self._host(samples, context, seed), order_of(self.data, len(samples), seed)

    def held_out(self, split: str, context: int) -> Source:
        return self.samples(split, context)

    @cached_property
    def texts(self) -> tuple[TrainingText, TrainingText]:
        """The tokens that are trained on, and their marks. Raises ConfigError as `training_text`."""
        splits = self.dataset.split("train"), self.marks.split("train")
        sizes = None if self.data.train_subset is None else conversation_sizes(splits[1])
        tokens, marks = (
            training_text(split, sizes, self.data, self.seed, "conversations") for split in splits
        )
        return tokens, marks

    @property
    def drawing(self) -> str:
        return self.texts[0].remark

    def samples(self, split: str, context: int) -> ChatSamples:
        """Return the conversations of a split, without `data.transform`."""
        data = self.data
        if split == "train":
            tokens, marks = (text.split for text in self.texts)
        else:
            tokens, marks = self.dataset.split(split), self.marks.split(split)
        separate = data.document_masks
        return ChatSamples(tokens, marks, context, packing=data.packing, separate=separate)

    def _separate(self, source: Source, context: int) -> Source:  # noqa: ARG002
        return source  # marks say where a conversation begins


@dataclass(frozen=True, eq=False)
class StreamData(DataSet):
    """A stream to train on, read from its beginning, and token shards for held-out splits."""

    use_sizes: bool
    """Whether the lanes were counted, so that each rank can read its own."""

    @property
    def fingerprint(self) -> str:
        """Hash of the held-out shards and of the config; the stream is not read for it."""
        lines = [self.dataset.fingerprint, *map(str, parameters(self.data, 0).items())]
        return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())

    def train_samples(self, context: int) -> None:  # noqa: ARG002
        return None

    def train(self, context: int, seed: int) -> tuple[Source, Order]:
        from instar.data.text.streams.index import open_stream

        source, order = open_stream(self.data, self.path, context, seed, use_sizes=self.use_sizes)
        return self._transform(source, context, seed), order


def unread_targets(data: DataConfig, context: int) -> TargetCount:
    """Return what can be said of the targets of samples that are not read before the run."""
    if data.transform is not None:
        return at_most(context, "data.transform may leave fewer targets")
    if data.kind == "chat":
        return at_most(context, "only the assistant's tokens will be targets")
    if not data.packing:
        return at_most(context, "documents may be shorter than the context")
    return TargetCount(context)


def _open_source(data: DataConfig, seed: int, context: int, order_seed: int) -> Source:
    """Open the source in a worker."""
    return open_data(data, seed).train(context, order_seed)[0]


def _open_tokens(data: DataConfig, seed: int) -> TokenData:
    open_shards = open_rows if data.kind == "rows" else open_dataset
    return TokenData(data, seed, open_shards(data.path or default_path(data, seed)))


def _parts(data: DataConfig) -> list[DataConfig]:
    """Return a config for each source, with its own folder."""
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
        part_data = data.model_copy(update=fields)
        path = f"{data.path}/{number}" if data.path else None
        parts.append(part_data.model_copy(update={"path": path}))
    return parts


def _counts_lanes(data: DataConfig, world_size: int) -> bool:
    return data.kind == "stream" and data.strategy == "sharded" and world_size > 1
