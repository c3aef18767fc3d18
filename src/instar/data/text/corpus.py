"""Corpora: text files, JSONL, Parquet, and the standard library as documents in a fixed order.

Documents are streamed: only the size of each document is kept.
"""

from __future__ import annotations

import codecs
import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from instar.config.errors import ConfigError, near_path
from instar.config.files import open_regular
from instar.data.order import Int64Array
from instar.record.progress import Advance, progress

STDLIB = "stdlib"
_TEXT_NAMES = """
    txt text md markdown rst tex org log csv tsv html htm css xml json yaml yml toml ini cfg sql sh
    py pyi pyx c h cc cpp cxx hpp cu rs go java kt scala js mjs jsx ts tsx rb pl php lua r jl swift
    hs ml ex exs erl clj lisp el zig f90 m
"""
_TEXT_SUFFIXES = frozenset(f".{name}" for name in _TEXT_NAMES.split())
_LINES = frozenset({".jsonl", ".ndjson"})
_ROW_SUFFIXES = _LINES | {".parquet"}
_NOT_OURS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_PIECE_BYTES = 1 << 20
_PARQUET_ROWS = 1024

Part = tuple[int, int, int]
"""(document, start, end): a document's number and the byte range taken of it."""

Document = TypeVar("Document")


class _Format(Protocol):
    """Reader of the documents in one file."""

    def sizes(self) -> Iterator[int]:
        """Yield the UTF-8 bytes of every document in the file."""
        ...

    def texts(self, parts: list[Part]) -> Iterator[Iterator[str]]:
        """Yield the text of each part in pieces; documents count from 0 and parts are ascending."""
        ...


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents of files: `sizes` in bytes, [documents]; file k's first document is firsts[k]."""

    files: tuple[_Format, ...]
    firsts: Int64Array
    sizes: Int64Array

    def texts(self, parts: NDArray[np.int64]) -> Iterator[Iterator[str]]:
        """Yield the text in pieces of each row (document, first byte, end byte) of parts, [n, 3].

        Rows ascend by document. A byte offset within a character is moved to the next character.
        Raises ConfigError if text cannot be decoded.
        """
        edges = np.searchsorted(parts[:, 0], self.firsts)
        for file, first, begin, end in zip(
            self.files, self.firsts[:-1], edges[:-1], edges[1:], strict=True
        ):
            if begin < end:
                rows = parts[begin:end] - np.array([first, 0, 0])
                yield from file.texts([(row[0], row[1], row[2]) for row in rows.tolist()])


def same_place(one: object, other: object) -> bool:
    """Whether two config values name the same file, folder or glob."""
    if one == other:
        return True
    words = {STDLIB, "byte", "char", "bpe"}
    if not (isinstance(one, str) and isinstance(other, str)) or words & {one, other}:
        return False
    return os.path.realpath(one) == os.path.realpath(other)


def open_corpus(source: str, text_field: str) -> Corpus:
    """Open a corpus and determine the sizes of its documents.

    Args:
        source: "stdlib", a file, a folder (searched for known text, JSONL and Parquet files), or a
            glob.

    Raises:
        ConfigError: there are no files, or rows lack `text_field`.
    """
    found = _stdlib() if source == STDLIB else [_format(p, text_field) for p in _find(source)]
    with progress(f"reading {source}") as advance:
        sizes_of_files = [np.fromiter(_told(file.sizes(), advance), np.int64) for file in found]
    sizes = np.concatenate(sizes_of_files) if sizes_of_files else np.empty(0, np.int64)
    if not sizes.any():
        what = "is empty" if len(found) == 1 else f"has no text in its {len(found)} files"
        raise ConfigError.one(f"{source} {what}", where="data.source", key="data.source")
    firsts = np.cumsum([0, *(one.size for one in sizes_of_files)], dtype=np.int64)
    return Corpus(files=tuple(found), firsts=firsts, sizes=sizes)


def _told(sizes: Iterator[int], advance: Advance) -> Iterator[int]:
    for size in sizes:
        advance(size)
        yield size


def read_lines(source: str) -> Iterator[tuple[Path, int, bytes]]:
    """Yield each line of the JSON Lines files of a source that is not blank: file, number, content.

    Raises ConfigError if there are no such files.
    """
    files = [file for file in _find(source) if file.suffix.lower() in _LINES]
    if not files:
        raise ConfigError.one(
            f"{source} is no JSON Lines file ({', '.join(sorted(_LINES))})", key="data.source"
        )
    for path in files:
        for number, line in _JSONLines(path, "").lines():
            yield path, number, line


def check_source(source: str) -> None:
    """Raise ConfigError unless the source has files."""
    if source != STDLIB:
        _find(source)


def _find(source: str) -> list[Path]:
    path = Path(source)
    if path.is_dir():
        known = _TEXT_SUFFIXES | _ROW_SUFFIXES
        files = [file for file in _walk(path) if file.suffix.lower() in known]
        missing = f"the folder {source} has no text files"
    elif path.exists():
        return [path]
    elif glob.has_magic(source):
        # Path.glob rejects absolute patterns
        matches = sorted(Path(name) for name in glob.glob(source, recursive=True))  # noqa: PTH207
        files = [file for file in matches if file.is_file()]
        missing = f"no file matches {source}"
    else:
        files, missing = [], f"there is no file or folder {source}"
    if not files:
        raise ConfigError.one(
            missing,
            where="data.source",
            hint=near_path(source)
            or f"give a file, a folder, a glob, or {STDLIB} for the Python standard library",
            key="data.source",
        )
    return files


def _walk(folder: Path, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield files below a folder in a fixed order, without hidden files, byte code and what is in
    folders named `without`."""
    without |= {"__pycache__"}
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n not in without)
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def _stdlib() -> list[_Format]:
    root = Path(sysconfig.get_path("stdlib"))
    return [
        _TextFile(file, decodable_only=True)
        for file in _walk(root, _NOT_OURS)
        if file.suffix == ".py"
    ]


def _format(path: Path, text_field: str) -> _Format:
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            return _JSONLines(path, text_field)
        case ".parquet":
            return _Parquet(path, text_field)
        case _:
            return _TextFile(path)


def _open(path: Path) -> IO[bytes]:
    try:
        return open_regular(path, follow=True)
    except OSError as error:
        raise ConfigError.one(
            f"cannot read {path}: {error.strerror}", where="data.source", key="data.source"
        ) from None


@dataclass(frozen=True)
class _TextFile:
    """A text file, which is one document."""

    path: Path
    decodable_only: bool = False

    def sizes(self) -> Iterator[int]:
        with _open(self.path) as file:
            if self.decodable_only:
                content = file.read()
                yield len(content) if _is_utf8(content) else 0
            else:
                yield os.fstat(file.fileno()).st_size

    def texts(self, parts: list[Part]) -> Iterator[Iterator[str]]:
        for _, begin, end in parts:
            yield self._pieces(begin, end)

    def _pieces(self, begin: int, end: int) -> Iterator[str]:
        """Yield pieces of about 1 MiB that end at line ends where possible."""
        with _open(self.path) as file:
            begin, end = (_next_character(file, at) for at in (begin, end))
            file.seek(begin)
            decoder = codecs.getincrementaldecoder("utf-8-sig" if begin == 0 else "utf-8")()
            held = ""
            while begin < end:
                content = file.read(min(_PIECE_BYTES, end - begin))
                pending = len(decoder.getstate()[0])
                begin += len(content)
                try:
                    held += decoder.decode(content, final=begin >= end or not content)
                except UnicodeDecodeError as error:
                    at = begin - len(content) - pending + error.start
                    raise _undecodable(self.path, at) from None
                if not content:
                    break
                cut = held.rfind("\n") + 1 or len(held)
                yield held[:cut]
                held = held[cut:]
            if held:
                yield held


@dataclass(frozen=True)
class _JSONLines:
    """A JSON Lines file; blank lines are skipped."""

    path: Path
    text_field: str

    def sizes(self) -> Iterator[int]:
        for number, line in self.lines():
            yield len(self._text(number, line).encode())

    def texts(self, parts: list[Part]) -> Iterator[Iterator[str]]:
        return _clipped(self.lines(), parts, lambda line: self._text(*line))

    def lines(self) -> Iterator[tuple[int, bytes]]:
        with _open(self.path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line

    def _text(self, number: int, line: bytes) -> str:
        where = f"{self.path}:{number}"
        try:
            row: Any = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError.one(f"this line is not JSON: {error}", where=where) from None
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise ConfigError.one(f"this line is not a JSON object but a {kind}", where=where)
        text = row.get(self.text_field)
        if not isinstance(text, str):
            keys = ", ".join(map(str, row)) or "none"
            what = "is not text" if self.text_field in row else f"is missing (keys: {keys})"
            raise ConfigError.one(
                f"the field {self.text_field!r} {what}",
                where=where,
                hint="name the field of the text in data.text_field",
                key="data.text_field",
            )
        return text


@dataclass(frozen=True)
class _Parquet:
    """A Parquet file with a text column; a null is an empty document."""

    path: Path
    text_field: str

    def sizes(self) -> Iterator[int]:
        for texts in self._batches():
            yield from (len(text.encode()) for text in texts)

    def texts(self, parts: list[Part]) -> Iterator[Iterator[str]]:
        return _clipped(chain.from_iterable(self._batches()), parts, str)

    def _batches(self) -> Iterator[list[str]]:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise ConfigError.one(
                f"reading {self.path} needs pyarrow, which is not installed",
                where="data.source",
                hint="install the extra: pip install 'instar[hf]'",
                key="data.source",
            ) from None
        with _open(self.path) as file:
            try:
                table = pq.ParquetFile(file)
                names = table.schema_arrow.names
                if self.text_field not in names:
                    raise ConfigError.one(
                        f"there is no column {self.text_field!r} (columns: {', '.join(names)})",
                        where=str(self.path),
                        hint="name the column of the text in data.text_field",
                        key="data.text_field",
                    )
                for batch in table.iter_batches(_PARQUET_ROWS, columns=[self.text_field]):
                    column = batch.column(0).cast(pa.large_string())
                    yield [text or "" for text in column.to_pylist()]
            except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
                raise ConfigError.one(
                    f"cannot read column {self.text_field!r} as text: {error}",
                    where=str(self.path),
                ) from None


def _clipped(
    documents: Iterable[Document], parts: list[Part], text: Callable[[Document], str]
) -> Iterator[Iterator[str]]:
    """Yield the parts of a file's documents, in order; `text` reads one document. Stops reading
    after the last part."""
    wanted = iter(parts)
    part = next(wanted, None)
    for number, document in enumerate(documents):
        while part is not None and part[0] == number:
            yield iter([clip(text(document), part)])
            part = next(wanted, None)
        if part is None:
            return


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _undecodable(path: Path, at: int) -> ConfigError:
    return ConfigError.one(
        f"{path} is not UTF-8 text: byte {at:,} cannot be decoded",
        where="data.source",
        hint="convert it, for example with iconv -t UTF-8",
        key="data.source",
    )


def _next_character(file: IO[bytes], at: int) -> int:
    """Return the first byte at or after `at` that starts a character, or the end of the file."""
    if at == 0:
        return 0
    file.seek(at)
    return at + _continuation_bytes(file.read(3))


def _continuation_bytes(content: bytes) -> int:
    return next((i for i, byte in enumerate(content) if byte & 0xC0 != 0x80), len(content))


def clip(text: str, part: Part) -> str:
    _, begin, end = part
    content = text.encode()
    if begin:
        begin += _continuation_bytes(content[begin : begin + 3])
    end += _continuation_bytes(content[end : end + 3])
    return content[begin:end].decode()
