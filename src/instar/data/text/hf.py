"""Hugging Face data sets, loaded with `datasets`: memory-mapped rows, or a stream.

A source is a folder written by `save_to_disk`; a file, glob or folder of Parquet, JSON lines, JSON,
CSV, Arrow or text; or a name on the hub. `datasets` keeps rows as memory-mapped Arrow: other
formats are converted once, into its cache. A text file is one document.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.text.files import SourceFiles, find_files, is_saved, suffix_of, walk
from instar.data.text.formats import (
    FORMATS,
    ArrowColumn,
    check_column,
    library,
    no_split,
    open_builder,
    other_columns,
    training_splits,
)
from instar.record.progress import folder_bytes, progress

Rows: TypeAlias = Any
"""A `datasets.Dataset`; the library has no types of its own and is imported where it is used."""
Stream: TypeAlias = Any
"""A `datasets.IterableDataset`."""


def load_rows(data: DataConfig) -> Rows:
    """Load the rows of `data.source`, memory-mapped, with the column that the config names.

    Raises:
        ConfigError: the source, split, subset or column does not exist, the column has another
            type, files cannot be read, there is no network, or `datasets` is not installed.
    """
    module = library()
    with _quiet(), _explain_errors(data):
        if is_saved(data.source):
            rows = _load_from_disk(data)
        else:
            builder = open_builder(data)
            with progress(
                f"downloading and converting {data.source}",
                builder.info.dataset_size,
                remaining_text="downloaded files are kept; the same command goes on",
                measure=_count_bytes(builder, data.source),
            ):
                builder.download_and_prepare()
            rows = builder.as_dataset(split=data.source_split)
    assert isinstance(rows, module.Dataset)
    check_column(rows.features, data)
    if not len(rows):
        message = f"{data.source} has no rows in its split {data.source_split}"
        raise ConfigError.at("data.source", message)
    return rows


def _count_bytes(builder: Any, source: str) -> Callable[[], float]:
    """Return a function that measures how many bytes of a data set the library has written."""
    import huggingface_hub

    hub = Path(huggingface_hub.constants.HF_HUB_CACHE, f"datasets--{source.replace('/', '--')}")
    folders = (hub, Path(f"{builder.cache_dir}.incomplete"))
    before = sum(map(folder_bytes, folders))
    return lambda: sum(map(folder_bytes, folders)) - before


def load_stream(data: DataConfig) -> Stream:
    """Open `data.source` as a stream, read from its beginning; nothing is converted or cached.

    The column is checked if the source declares its columns without being read. Raises ConfigError
    as `load_rows` does.
    """
    module = library()
    with _quiet(), _explain_errors(data):
        if is_saved(data.source):
            rows = _load_from_disk(data)
            stream = rows.to_iterable_dataset(num_shards=max(1, min(data.lanes, len(rows))))
        else:
            builder = open_builder(data, streams=True)
            stream = builder.as_streaming_dataset(split=data.source_split)
    assert isinstance(stream, module.IterableDataset)
    if stream.features is not None:
        check_column(stream.features, data)
    return stream


def unread_splits(data: DataConfig, held_out: Iterable[Path] = ()) -> tuple[str, ...]:
    """Return the names of splits in the folder `data.source` that nothing reads; () of other sources.

    Args:
        held_out: files that are read besides those to train on.
    """
    if not Path(data.source).is_dir():
        return ()
    if is_saved(data.source):
        with _quiet(), _explain_errors(data):
            data_set = library().load_from_disk(data.source)
        names = [*data_set] if isinstance(data_set, Mapping) else []
    else:
        held_out_files = {os.path.realpath(file) for file in held_out}
        names = [
            str(name)
            for name, files in _files_of_splits(data).items()
            if not held_out_files.issuperset(map(os.path.realpath, files))
        ]
    read = training_splits(data)
    return () if "all" in read else tuple(name for name in names if name not in read)


def _files_of_splits(data: DataConfig) -> Mapping[str, Sequence[str]]:
    module = library()
    with _quiet(), _explain_errors(data):
        files = module.load_dataset_builder(data.source, data.subset).config.data_files
    return cast("Mapping[str, Sequence[str]]", files or {})


def unread_files(data: DataConfig) -> tuple[str, ...]:
    """Return the names of files in the folder `data.source` that are in no split of it; () of other sources."""
    folder = Path(data.source)
    if not folder.is_dir() or is_saved(data.source):
        return ()
    splits = _files_of_splits(data)
    read = {os.path.realpath(file) for files in splits.values() for file in files}
    left_out: list[str] = []
    inside = [file for file in walk(folder, left_out) if os.path.realpath(file) not in read]
    return (*(os.path.relpath(file, folder) for file in inside), *left_out)


def column_of(rows: Rows, name: str) -> ArrowColumn:
    """Return a column as memory-mapped Arrow, in the order of the rows."""
    if rows._indices is not None:
        rows = rows.flatten_indices()
    return rows.data.table.column(name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable progress bars, the library's log lines, download counts and telemetry."""
    import huggingface_hub

    datasets = library()
    places: tuple[Any, ...] = (datasets.utils, huggingface_hub.utils)
    before = [(p.are_progress_bars_disabled(), p.logging.get_verbosity()) for p in places]
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True
    for place in places:
        place.disable_progress_bars()
        place.logging.set_verbosity(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for place, (without_bars, verbosity) in zip(places, before, strict=True):
            place.logging.set_verbosity(verbosity)
            if not without_bars:
                place.enable_progress_bars()


@contextmanager
def _explain_errors(data: DataConfig) -> Iterator[None]:
    """Turn exceptions of the library and its parsers into a ConfigError about the source."""
    try:
        yield
    except ConfigError:
        raise
    except ConnectionError as error:
        raise ConfigError.at(
            "data.source",
            f"{data.source} is not a file or folder here, and the hub cannot be reached: {error}",
            "check the network, or give a path",
        ) from None
    except StopIteration:  # the library raises it for files without rows
        raise ConfigError.at("data.source", f"{data.source} is empty") from None
    except FileNotFoundError as error:
        raise ConfigError.at(
            "data.source", f"there is nothing to load at {data.source}: {_cause_text(error)}"
        ) from None
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ConfigError):  # of a row, within the library
                raise cause from None
            if differs := other_columns(cause, data.source):
                raise differs from None
            cause = cause.__cause__
        if "BuilderConfig" in str(error) or "Config name is missing" in str(error):
            raise ConfigError.at("data.subset", _cause_text(error)) from None
        raise ConfigError.at(
            "data.source", f"{data.source} cannot be loaded: {_cause_text(error)}"
        ) from None


def _cause_text(error: BaseException) -> str:
    """Return the first lines of an error and of its causes."""
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        line = next(iter(str(cause).strip().splitlines()), "") or type(cause).__name__
        if line not in lines:
            lines.append(line)
        cause = cause.__cause__
    return ": ".join(line.rstrip(".:") for line in lines)


def _load_from_disk(data: DataConfig) -> Any:
    """Load what `save_to_disk` wrote: one data set, or one per split."""
    data_set = library().load_from_disk(data.source)
    if isinstance(data_set, Mapping):
        if data.source_split not in data_set:
            raise no_split(data_set, data)
        return data_set[data.source_split]
    if data.source_split not in {"train", str(data_set.split)}:
        raise no_split(["train"], data)
    return data_set


def local_files(source: str) -> SourceFiles | None:
    """Return the files of rows on this machine; None for a name on the hub.

    Raises:
        NoFiles: there are none.
    """
    path = Path(source)
    if path.is_dir():
        suffixes = {*FORMATS, ".arrow"}
        inside = (file for file in walk(path) if suffix_of(file) in suffixes)
        return SourceFiles(path, tuple(inside))
    if glob.has_magic(source) or path.exists():
        return find_files(source)
    return None
