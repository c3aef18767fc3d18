"""Builders of `datasets` that read the one column which is trained on, whatever others its files have.

The files are those that a source names, or those that `datasets` finds in a folder for its splits. Their rows
are the same for every kind of data; files of other formats, and names on the hub, are read by `datasets` itself.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeAlias

from instar.config.errors import ConfigError
from instar.config.files import open_regular
from instar.config.language import DataConfig
from instar.data.text.files import field_value, json_rows, suffix_of

ArrowTable: TypeAlias = Any
ArrowColumn: TypeAlias = Any
ArrowType: TypeAlias = Any
ArrowSchema: TypeAlias = Any
"""Objects of pyarrow, which has no types of its own and is imported where it is used."""

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
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
_OF_CONFIG = frozenset({"name", "version", "data_dir", "data_files", "description", "features"})
_SPLIT = "train"


def open_builder(data: DataConfig, *, streams: bool = False) -> Any:
    """Return the builder of the one column that is read, whatever others its files have.

    Args:
        streams: files are opened when they are read; only the first of a split is looked at.
    """
    files = _files(data.source)
    if files:
        check_split((_SPLIT,), data)
        return _of_files({_SPLIT: files}, data, {}, streams=streams)
    # `datasets` reads a format's name, e.g. "csv", as all such files in the current folder
    if data.source in library().packaged_modules._PACKAGED_DATASETS_MODULES:
        raise _no_rows(data.source)
    load = library().load_dataset_builder
    builder = load(data.source, data.subset)
    if Path(data.source).is_dir() and (splits := _files_of(builder)):
        names = check_split(splits, data)
        splits = {name: files for name, files in splits.items() if {name, "all"} & names}
        return _of_files(splits, data, _settings(builder.config), streams=streams)
    check_split(builder.info.splits or builder.config.data_files or (), data)
    for format_name, options in {**_OPTIONS, "parquet": {"batch_size": _PARQUET_ROWS}}.items():
        if type(builder.config).__name__.lower() == f"{format_name}config":
            return load(data.source, data.subset, **options)
    return builder


def training_splits(data: DataConfig) -> set[str]:
    """Return the names in `data.source_split`; splits may be sliced, "train[:10%]", and added, "a+b"."""
    return {re.sub(r"\[.*", "", part).strip() for part in data.source_split.split("+")}


def check_split(existing: Iterable[Any], data: DataConfig) -> set[str]:
    """Return the names in `data.source_split`.

    Raises:
        ConfigError: there are others only.
    """
    names = [str(name) for name in existing]
    split_names = training_splits(data)
    if names and not split_names <= {*names, "all"}:
        raise no_split(names, data)
    return split_names


def no_split(names: Iterable[Any], data: DataConfig) -> ConfigError:
    """Return the error of a split that is not among those of the source."""
    message = (
        f"{data.source} has no split {data.source_split!r}, it has: {', '.join(map(str, names))}"
    )
    return ConfigError.at("data.source_split", message)


def _files_of(builder: Any) -> dict[str, list[Path]]:
    """Return the files of each split of a folder; {} if rows are not read from files like these."""
    splits = {
        str(split): [Path(file) for file in files]
        for split, files in (builder.config.data_files or {}).items()
    }
    every = [file for files in splits.values() for file in files]
    kind = type(builder.config).__name__.lower().removesuffix("config")
    if any(FORMATS.get(suffix_of(file), ("",))[0] != kind for file in every):
        return {}
    # what a card says of JSON, such as a field within, is the library's to read
    return {} if kind == "json" and _settings(builder.config) else splits


def _settings(config: Any) -> dict[str, Any]:
    """Return what a card sets for the reader of a format, such as the separator of CSV."""
    return {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in _OF_CONFIG and getattr(config, field.name) != field.default
    }


def _of_files(
    splits: Mapping[str, Sequence[Path]],
    data: DataConfig,
    settings: Mapping[str, Any],
    *,
    streams: bool,
) -> Any:
    """Return a builder of files, all of one format, by split.

    Args:
        settings: further options of the library's reader.
    """
    format_name, options = _format([file for files in splits.values() for file in files])
    options = {**options, **settings, **_OPTIONS.get(format_name, {})}
    looked_at = [file for files in splits.values() for file in (files[:1] if streams else files)]
    name = data.tokens_field or data.text_field
    if format_name == "parquet":
        _check_parquet(looked_at, data)
        # some files may be empty, which have no type
        types = {} if data.tokens_field else {"features": _features(data)}
        options |= {"columns": [name], "batch_size": _PARQUET_ROWS, **types}
    elif format_name == "json":
        options["features"] = _features(data)
        for files in splits.values():
            _check_first_row(files, data)
    names = {
        # links may lead to names without an ending
        split: [glob.escape(os.path.abspath(file)) for file in files]  # noqa: PTH100
        for split, files in splits.items()
    }
    load = partial(library().load_dataset_builder, format_name, data_files=names)
    if format_name == "csv":
        _check_csv(looked_at, data, load(**options).config.pd_read_csv_kwargs)
        # text whatever it looks like: neither a number nor a type that differs between files
        options |= {"usecols": [name], "features": _features(data)}
    builder = load(**options)
    if format_name == "json":
        builder._generate_tables = partial(_json_tables, data)
    elif format_name in ("csv", "parquet") and data.tokens_field is None:
        builder._cast_table = partial(_as_text, data.text_field)
    return builder


def library() -> Any:
    """Return the module `datasets`. Raises ConfigError if it is not installed."""
    try:
        import datasets
    except ImportError:
        raise ConfigError.at(
            "data.kind",
            "rows and streams need the library `datasets`, which is not installed",
            "install the extra: pip install 'instar[hf]'",
        ) from None
    return datasets


def _check_csv(files: Sequence[Path], data: DataConfig, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if the header of a file does not have the column."""
    from pandas import read_csv
    from pyarrow import Table

    for file in files:
        names = read_csv(file, **{**options, "nrows": 0, "chunksize": None}).columns
        check_schema(Table.from_pydict({str(name): [""] for name in names}).schema, data, str(file))


def _features(data: DataConfig) -> Any:
    module = library()
    if data.tokens_field is None:
        return module.Features({data.text_field: module.Value("large_string")})
    return module.Features({data.tokens_field: module.List(module.Value("int64"))})


def _check_parquet(files: Sequence[Path], data: DataConfig) -> None:
    """Raise ConfigError if a file has no such column, or one of another type."""
    import pyarrow.parquet as pq

    for file in files:
        with open_regular(file, follow=True) as stream:
            schema = pq.read_schema(stream)
        check_schema(schema, data, str(file))


def _as_text(name: str, table: ArrowTable) -> ArrowTable:
    """Return a column of text of any of Arrow's types as large strings."""
    import pyarrow as pa

    column = table.column(name)
    if not is_text(column.type):
        raise ConfigError.of(
            f"the column {name!r} holds {column.type}, not text", key="data.text_field"
        )
    return pa.table({name: column.cast(pa.large_string())})


def _check_first_row(files: Sequence[Path], data: DataConfig) -> None:
    """Raise ConfigError unless the first row of JSON files has what the config names."""
    first_row = next(((file, *row) for file in files for row in json_rows(file)), None)
    if first_row is None:
        raise ConfigError.at("data.source", f"{data.source} is empty")
    ids = data.tokens_field is not None
    field_value(*first_row, data.tokens_field or data.text_field, ids=ids)


def _json_tables(
    data: DataConfig, base_files: Sequence[str], **_: Any
) -> Iterator[tuple[Any, ArrowTable]]:
    """Yield the column of JSON files, in the place of the library's reader: rows are those of kind tokens."""
    import pyarrow as pa

    key = library().builder.Key
    ids = data.tokens_field is not None
    field = data.tokens_field or data.text_field
    kind = pa.list_(pa.int64()) if ids else pa.large_string()
    for shard, name in enumerate(base_files):
        file = Path(name)
        values = (field_value(file, *row, field, ids=ids) for row in json_rows(file))
        number = 0
        while batch := [*islice(values, _PARQUET_ROWS)]:
            yield key(shard, number), pa.table({field: pa.array(batch, kind)})
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
            raise ConfigError.at("data.source", f"no file matches {source}")
        return files
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", source) or suffix_of(path) in FORMATS:
        raise _no_rows(source)
    return []


def _no_rows(source: str) -> ConfigError:
    message, hint = (
        f"there is no file or folder {source}",
        "give a path, a glob, or a name on the hub",
    )
    return ConfigError.at("data.source", message, hint)


def _format(files: list[Path]) -> tuple[str, dict[str, Any]]:
    suffixes = sorted({suffix_of(file) for file in files})
    formats = {FORMATS[suffix][0] for suffix in suffixes if suffix in FORMATS}
    unknown = next((file for file in files if suffix_of(file) not in FORMATS), None)
    if unknown is not None:
        raise ConfigError.at(
            "data.source",
            f"{unknown}: rows are not read from files like this",
            f"known are {', '.join(FORMATS)}; kind tokens prepares any text",
        )
    if len(suffixes) > 1 and (len(formats) > 1 or ".tsv" in suffixes):
        raise ConfigError.at(
            "data.source", f"the files are of several kinds: {', '.join(suffixes)}", "give one kind"
        )
    return FORMATS[suffixes[0]]


def check_column(features: Any, data: DataConfig) -> None:
    check_schema(features.arrow_schema, data, data.source)


def check_schema(schema: ArrowSchema, data: DataConfig, place: str) -> None:
    key = "data.text_field" if data.tokens_field is None else "data.tokens_field"
    name = data.tokens_field or data.text_field
    if name not in schema.names:
        raise ConfigError.at(
            key,
            f"{place} has no column {name!r} (columns: {', '.join(schema.names)})",
            "name the column of the text in data.text_field, or that of token ids in data.tokens_field",
        )
    dtype = schema.field(name).type
    if not (is_text(dtype) if data.tokens_field is None else is_ids(dtype)):
        expected = "text" if data.tokens_field is None else "lists of token ids"
        message = f"the column {name!r} of {place} holds {dtype}, not {expected}"
        raise ConfigError.at(key, message, "name another column")


_TEXT = re.compile(r"(large_)?(string|binary)|(string|binary)_view")
_IDS = re.compile(r"(large_|fixed_size_)?list<.*>(\[\d+\])?")
_INTEGER = re.compile(r"u?int\d+")


def is_text(dtype: ArrowType) -> bool:
    plain = dtype.value_type if str(dtype).startswith("dictionary<") else dtype
    return _TEXT.fullmatch(str(plain)) is not None


def is_ids(dtype: ArrowType) -> bool:
    return bool(_IDS.fullmatch(str(dtype)) and _INTEGER.fullmatch(str(dtype.value_type)))


def other_columns(error: BaseException, place: str) -> ConfigError | None:
    """Return the error of a file with other columns than the first, which `datasets` refuses; None of others.

    Args:
        place: where it was read, if the error does not name the file.
    """
    if isinstance(error, library().table.CastError):
        what = error.details().rstrip(".")
    elif isinstance(error, library().exceptions.DatasetGenerationCastError):
        pieces = str(error).split("\n\n")
        what = pieces[1].rpartition("at some point ")[2]
        files = (file for before, file in pairwise(pieces) if "generating data using" in before)
        place = next(files, place)
    else:
        return None
    return ConfigError.of(
        f"the files do not have the same columns, which `datasets` needs: {what}",
        where=place,
        hint="give the files themselves, as a folder or glob: of these only the column that is trained on is "
        "read (hf download NAME --repo-type dataset --local-dir FOLDER; archives unpacked)",
        key="data.source",
    )
