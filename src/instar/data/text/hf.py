"""Hugging Face data sets, loaded with `datasets`: memory-mapped rows, or a stream.

A source is a folder written by `save_to_disk`; a file, glob or folder of Parquet, JSON lines, JSON,
CSV, Arrow or text; or a name on the hub. `datasets` keeps rows as memory-mapped Arrow: other
formats are converted once, into its cache. A text file is one document.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instar.config.errors import ConfigError
from instar.config.files import open_regular
from instar.config.language import DataConfig
from instar.data.text.files import SourceFiles, find, suffix_of, walk
from instar.data.text.json_rows import rows as json_rows
from instar.data.text.json_rows import value_of
from instar.record.progress import folder_bytes, progress

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa


_FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".parquet": ("parquet", {}),
    ".jsonl": ("json", {}),
    ".ndjson": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {"sep": ","}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".arrow": ("arrow", {}),
    ".txt": ("text", {}),
    ".text": ("text", {}),
    ".md": ("text", {}),
}
_PARQUET_ROWS = 1024
_OPTIONS: dict[str, dict[str, Any]] = {
    "text": {"sample_by": "document", "encoding": "utf-8-sig"},
    "csv": {"keep_default_na": False},  # keep the word "null" as text
}


def load_rows(data: DataConfig) -> datasets.Dataset:
    """Load the rows of `data.source`, memory-mapped, with the column that the config names.

    Raises:
        ConfigError: the source, split, subset or column does not exist, the column has another
            type, files cannot be read, there is no network, or `datasets` is not installed.
    """
    library = _library()
    with _quiet(), _explained(data):
        if _is_saved(data.source):
            rows = _saved(data)
        else:
            builder = _builder(data)
            _check_split(builder, data)
            with progress(
                f"downloading and converting {data.source}",
                builder.info.dataset_size,
                left="downloaded files are kept; the same command goes on",
                measured=_written(builder, data.source),
            ):
                builder.download_and_prepare()
            rows = builder.as_dataset(split=data.source_split)
    assert isinstance(rows, library.Dataset)
    _check_column(rows.features, data)
    if not len(rows):
        raise _at_source(f"{data.source} has no rows in its split {data.source_split}")
    return rows


def _written(builder: Any, source: str) -> Callable[[], float]:
    """Return a function that measures how many bytes of a data set the library has written."""
    import huggingface_hub

    hub = Path(huggingface_hub.constants.HF_HUB_CACHE, f"datasets--{source.replace('/', '--')}")
    folders = (hub, Path(f"{builder.cache_dir}.incomplete"))
    before = sum(map(folder_bytes, folders))
    return lambda: sum(map(folder_bytes, folders)) - before


def load_stream(data: DataConfig) -> datasets.IterableDataset:
    """Open `data.source` as a stream, read from its beginning; nothing is converted or cached.

    The column is checked if the source declares its columns without being read. Raises ConfigError
    as `load_rows` does.
    """
    library = _library()
    with _quiet(), _explained(data):
        if _is_saved(data.source):
            rows = _saved(data)
            stream = rows.to_iterable_dataset(num_shards=max(1, min(data.lanes, len(rows))))
        else:
            builder = _builder(data, streams=True)
            _check_split(builder, data)
            stream = builder.as_streaming_dataset(split=data.source_split)
    assert isinstance(stream, library.IterableDataset)
    if stream.features is not None:
        _check_column(stream.features, data)
    return stream


def column_of(rows: datasets.Dataset, name: str) -> pa.ChunkedArray:
    """Return a column as memory-mapped Arrow, in the order of the rows."""
    if rows._indices is not None:
        rows = rows.flatten_indices()
    return rows.data.table.column(name)


def _library() -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError.one(
            "rows and streams need the library `datasets`, which is not installed",
            where="data.kind",
            hint="install the extra: pip install 'instar[hf]'",
            key="data.kind",
        ) from None
    return datasets


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable progress bars, the library's log lines, download counts and telemetry."""
    import datasets
    import huggingface_hub

    places: tuple[Any, ...] = (datasets.utils, huggingface_hub.utils)
    before = [
        (place.are_progress_bars_disabled(), place.logging.get_verbosity()) for place in places
    ]
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
def _explained(data: DataConfig) -> Iterator[None]:
    """Turn exceptions of the library and its parsers into a ConfigError about the source."""
    try:
        yield
    except ConfigError:
        raise
    except ConnectionError as error:
        raise ConfigError.one(
            f"{data.source} is not a file or folder here, and the hub cannot be reached: {error}",
            where="data.source",
            hint="check the network, or give a path",
            key="data.source",
        ) from None
    except StopIteration:  # the library raises it for files without rows
        raise _at_source(f"{data.source} is empty") from None
    except FileNotFoundError as error:
        raise _at_source(f"there is nothing to load at {data.source}: {_said(error)}") from None
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ConfigError):  # of a row, within the library
                raise cause from None
            cause = cause.__cause__
        if "BuilderConfig" in str(error) or "Config name is missing" in str(error):
            raise ConfigError.one(_said(error), where="data.subset", key="data.subset") from None
        raise _at_source(f"{data.source} cannot be loaded: {_said(error)}") from None


def _said(error: BaseException) -> str:
    """Return the first lines of an error and of its causes."""
    said: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        line = next(iter(str(cause).strip().splitlines()), "") or type(cause).__name__
        if line not in said:
            said.append(line)
        cause = cause.__cause__
    return ": ".join(line.rstrip(".:") for line in said)


def _at_source(message: str, hint: str = "") -> ConfigError:
    return ConfigError.one(message, where="data.source", hint=hint, key="data.source")


def _is_saved(source: str) -> bool:
    return any(Path(source, name).is_file() for name in ("state.json", "dataset_dict.json"))


def _saved(data: DataConfig) -> Any:
    """Load what `save_to_disk` wrote: one data set, or one per split."""
    found = _library().load_from_disk(data.source)
    if isinstance(found, Mapping):
        if data.source_split not in found:
            raise _no_split(data, found)
        return found[data.source_split]
    return found


def _builder(data: DataConfig, *, streams: bool = False) -> Any:
    """Return the builder of the one column that is read, whatever others its files have.

    Args:
        streams: files are opened when they are read; only the first is looked at.
    """
    load = _library().load_dataset_builder
    files = _files(data.source)
    if files:
        format_name, options = _format(files)
        options = {**options, **_OPTIONS.get(format_name, {})}
        if format_name == "parquet":
            _check_parquet(files[:1] if streams else files, data)
            options |= _of_parquet(data)
        elif format_name == "json":
            options["features"] = _features(data)
            _check_first_row(files, data)
        names = {"train": [glob.escape(str(file.resolve())) for file in files]}
        builder = load(format_name, data_files=names, **options)
        if format_name == "json":
            builder._generate_tables = partial(_json_tables, data)
        elif format_name == "csv":
            builder._cast_table = partial(_known_columns, builder, builder._cast_table)
        elif format_name == "parquet" and data.tokens_field is None:
            builder._cast_table = partial(_as_text, data.text_field)
        return builder
    # `datasets` reads a format's name, e.g. "csv", as all such files in the current folder
    if data.source in _library().packaged_modules._PACKAGED_DATASETS_MODULES:
        raise _nothing(data.source)
    builder = load(data.source, data.subset)
    for format_name, options in {**_OPTIONS, "parquet": {"batch_size": _PARQUET_ROWS}}.items():
        if type(builder.config).__name__.lower() == f"{format_name}config":
            return load(data.source, data.subset, **options)
    return builder


def _features(data: DataConfig) -> datasets.Features:
    library = _library()
    if data.tokens_field is None:
        return library.Features({data.text_field: library.Value("large_string")})
    return library.Features({data.tokens_field: library.List(library.Value("int64"))})


def _check_parquet(files: Sequence[Path], data: DataConfig) -> None:
    """Raise ConfigError if a file has no such column, or one of another type."""
    import pyarrow.parquet as pq

    for file in files:
        with open_regular(file, follow=True) as opened:
            schema = pq.read_schema(opened)
        _check_schema(schema, data, str(file))


def _of_parquet(data: DataConfig) -> dict[str, Any]:
    """Return the options to read one column of Parquet files, some of which may be empty."""
    name = data.tokens_field or data.text_field
    options: dict[str, Any] = {"columns": [name], "batch_size": _PARQUET_ROWS}
    return options if data.tokens_field else options | {"features": _features(data)}


def _as_text(name: str, table: pa.Table) -> pa.Table:
    """Return a column of text of any of Arrow's types as large strings."""
    import pyarrow as pa

    column = table.column(name)
    if not is_text(column.type):
        raise ConfigError.one(
            f"the column {name!r} holds {column.type}, not text", key="data.text_field"
        )
    return pa.table({name: column.cast(pa.large_string())})


def _known_columns(builder: Any, cast: Callable[[pa.Table], pa.Table], table: pa.Table) -> pa.Table:
    """Return a table of CSV without the columns that the first file does not have."""
    known = builder.info.features
    return cast(
        table if known is None else table.select([n for n in table.column_names if n in known])
    )


def _check_first_row(files: Sequence[Path], data: DataConfig) -> None:
    """Raise ConfigError unless the first row of JSON files has what the config names."""
    found = next(((file, *row) for file in files for row in json_rows(file)), None)
    if found is None:
        raise _at_source(f"{data.source} is empty")
    ids = data.tokens_field is not None
    value_of(*found, data.tokens_field or data.text_field, ids=ids)


def _json_tables(
    data: DataConfig, base_files: Sequence[str], **_: Any
) -> Iterator[tuple[Any, pa.Table]]:
    """Yield the column of JSON files, in the place of the library's reader: rows are those of kind tokens."""
    import pyarrow as pa
    from datasets.builder import Key

    ids = data.tokens_field is not None
    field = data.tokens_field or data.text_field
    kind = pa.list_(pa.int64()) if ids else pa.large_string()
    for shard, name in enumerate(base_files):
        file = Path(name)
        values = (value_of(file, *row, field, ids=ids) for row in json_rows(file))
        number = 0
        while some := [*islice(values, _PARQUET_ROWS)]:
            yield Key(shard, number), pa.table({field: pa.array(some, kind)})
            number += 1


def _files(source: str) -> list[Path]:
    """Return the files that a source names; [] for a folder or a name on the hub."""
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        return []
    if glob.has_magic(source):
        # Path.glob rejects absolute patterns
        matches = sorted(Path(name) for name in glob.glob(source, recursive=True))  # noqa: PTH207
        files = [file for file in matches if file.is_file()]
        if not files:
            raise _at_source(f"no file matches {source}")
        return files
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", source) or suffix_of(path) in _FORMATS:
        raise _nothing(source)
    return []


def local_files(source: str) -> SourceFiles | None:
    """Return the files of rows on this machine; None for a name on the hub.

    Raises:
        NoFiles: there are none.
    """
    path = Path(source)
    if path.is_dir():
        known = {*_FORMATS, ".arrow"}
        inside = (file for file in walk(path) if suffix_of(file) in known)
        return SourceFiles(path, tuple(inside))
    if glob.has_magic(source) or path.exists():
        return find(source)
    return None


def _nothing(source: str) -> ConfigError:
    return _at_source(
        f"there is no file or folder {source}", "give a path, a glob, or a name on the hub"
    )


def _format(files: list[Path]) -> tuple[str, dict[str, Any]]:
    suffixes = sorted({suffix_of(file) for file in files})
    formats = {_FORMATS[suffix][0] for suffix in suffixes if suffix in _FORMATS}
    unknown = next((file for file in files if suffix_of(file) not in _FORMATS), None)
    if unknown is not None:
        raise _at_source(
            f"{unknown}: rows are not read from files like this",
            f"known are {', '.join(_FORMATS)}; kind tokens prepares any text",
        )
    if len(suffixes) > 1 and (len(formats) > 1 or ".tsv" in suffixes):
        raise _at_source(f"the files are of several kinds: {', '.join(suffixes)}", "give one kind")
    return _FORMATS[suffixes[0]]


def _check_split(builder: Any, data: DataConfig) -> None:
    """Check the split before converting; splits may be sliced, "train[:10%]", and added, "a+b"."""
    known: Iterable[str] = builder.info.splits or builder.config.data_files or ()
    asked = [re.sub(r"\[.*", "", part).strip() for part in data.source_split.split("+")]
    if known and not {*asked} <= {*map(str, known), "all"}:
        raise _no_split(data, known)


def _no_split(data: DataConfig, known: Iterable[str]) -> ConfigError:
    return ConfigError.one(
        f"{data.source} has no split {data.source_split!r}, it has: {', '.join(map(str, known))}",
        where="data.source_split",
        key="data.source_split",
    )


def _check_column(features: datasets.Features, data: DataConfig) -> None:
    _check_schema(features.arrow_schema, data, data.source)


def _check_schema(schema: pa.Schema, data: DataConfig, place: str) -> None:
    key = "data.text_field" if data.tokens_field is None else "data.tokens_field"
    name = data.tokens_field or data.text_field
    if name not in schema.names:
        raise ConfigError.one(
            f"{place} has no column {name!r} (columns: {', '.join(schema.names)})",
            where=key,
            hint="name the column of the text in data.text_field, or that of token ids in "
            "data.tokens_field",
            key=key,
        )
    found = schema.field(name).type
    if not (is_text(found) if data.tokens_field is None else is_ids(found)):
        wanted = "text" if data.tokens_field is None else "lists of token ids"
        raise ConfigError.one(
            f"the column {name!r} of {place} holds {found}, not {wanted}",
            where=key,
            hint="name another column",
            key=key,
        )


def is_text(found: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(found):
        found = found.value_type
    of_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    of_bytes = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return any(is_kind(found) for is_kind in (*of_text, *of_bytes))


def is_ids(found: pa.DataType) -> bool:
    import pyarrow as pa

    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_list(found) for is_list in lists) and pa.types.is_integer(found.value_type)
