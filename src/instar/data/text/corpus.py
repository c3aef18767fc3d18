"""Corpora: text files, JSONL, Parquet, and the standard library as documents in a fixed order.

Documents are streamed: only the size of each document is kept.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.data.order import Int64Array
from instar.data.text.files import (
    JSON,
    LINES,
    PACKED,
    PARQUET,
    STDLIB,
    field_value,
    find_files,
    json_rows,
    names_text,
    open_source,
    standard_library,
    suffix_of,
)
from instar.data.text.formats import is_text
from instar.record.progress import Advance, progress

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


def open_corpus(source: str, text_field: str) -> Corpus:
    """Open a corpus and determine the sizes of its documents.

    Args:
        source: "stdlib", a file, a folder (searched for known text, JSONL and Parquet files), or a glob.

    Raises:
        ConfigError: there are no files, or rows lack `text_field`.
    """
    if source == STDLIB:
        formats: list[_Format] = [_TextFile(f, decodable_only=True) for f in standard_library()]
    else:
        files = find_files(source)
        formats = [_format(file, text_field, files.json_is_rows) for file in files.files]
    with progress(f"reading {source}") as advance:
        counted = (_report_sizes(file.sizes(), advance) for file in formats)
        sizes_of_files = [np.fromiter(sizes, np.int64) for sizes in counted]
    sizes = np.concatenate(sizes_of_files) if sizes_of_files else np.empty(0, np.int64)
    if not sizes.any():
        what = "is empty" if len(formats) == 1 else f"has no text in its {len(formats)} files"
        raise ConfigError.at("data.source", f"{source} {what}")
    firsts = np.cumsum([0, *(file_sizes.size for file_sizes in sizes_of_files)], dtype=np.int64)
    return Corpus(files=tuple(formats), firsts=firsts, sizes=sizes)


def _report_sizes(sizes: Iterator[int], advance: Advance) -> Iterator[int]:
    for size in sizes:
        advance(size)
        yield size


def read_lines(source: str) -> Iterator[tuple[Path, int, bytes]]:
    """Yield each line of the JSON Lines files of a source that is not blank: file, number, content.

    Raises ConfigError if there are no such files, or others that may hold conversations.
    """
    listing = find_files(source)
    endings = {*LINES, JSON} if listing.json_is_rows else LINES
    files = [file for file in listing.files if suffix_of(file) in endings]
    left_out = [file for file in listing.files if file not in files]
    # text beside them is no conversation, as a README is none
    if files and (leftovers := [file for file in left_out if suffix_of(file) in {JSON, PARQUET}]):
        names = names_text([listing.name(file) for file in leftovers])
        raise ConfigError.of(
            f"{source} has files that kind chat does not read with these: {names}",
            hint=f"name those to read by a glob, such as {Path(source) / '*.jsonl'}",
            key="data.source",
        )
    if not files:
        raise ConfigError.of(
            f"{source} is no JSON Lines file ({', '.join(sorted(LINES))})", key="data.source"
        )
    for path in files:
        for number, row in json_rows(path):
            yield path, number, row


def _format(path: Path, text_field: str, json_is_rows: bool) -> _Format:
    suffix = suffix_of(path)
    if suffix in LINES or (suffix == JSON and json_is_rows):
        return _JSONRows(path, text_field)
    if path.suffix.lower() in PACKED:
        message = f"{path} is compressed, and only JSON is unpacked"
        raise ConfigError.at("data.source", message, "unpack it")
    return _Parquet(path, text_field) if suffix == PARQUET else _TextFile(path)


@dataclass(frozen=True)
class _TextFile:
    """A text file, which is one document."""

    path: Path
    decodable_only: bool = False

    def sizes(self) -> Iterator[int]:
        with open_source(self.path) as file:
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
        with open_source(self.path) as file:
            begin, end = (_next_character(file, at) for at in (begin, end))
            file.seek(begin)
            decoder = codecs.getincrementaldecoder("utf-8-sig" if begin == 0 else "utf-8")()
            text = ""
            while begin < end:
                content = file.read(min(_PIECE_BYTES, end - begin))
                pending = len(decoder.getstate()[0])
                begin += len(content)
                try:
                    text += decoder.decode(content, final=begin >= end or not content)
                except UnicodeDecodeError as error:
                    at = begin - len(content) - pending + error.start
                    raise _undecodable(self.path, at) from None
                if not content:
                    break
                cut = text.rfind("\n") + 1 or len(text)
                yield text[:cut]
                text = text[cut:]
            if text:
                yield text


@dataclass(frozen=True)
class _JSONRows:
    """Rows of a JSON file; null is an empty document."""

    path: Path
    text_field: str

    def sizes(self) -> Iterator[int]:
        for row in json_rows(self.path):
            yield len(self._text(row).encode())

    def texts(self, parts: list[Part]) -> Iterator[Iterator[str]]:
        return _clip_documents(json_rows(self.path), parts, self._text)

    def _text(self, row: tuple[int, bytes]) -> str:
        text: str = field_value(self.path, *row, self.text_field)
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
        return _clip_documents(chain.from_iterable(self._batches()), parts, str)

    def _batches(self) -> Iterator[list[str]]:
        try:
            from pyarrow import ArrowException, large_string, parquet
        except ImportError:
            raise ConfigError.at(
                "data.source",
                f"reading {self.path} needs pyarrow, which is not installed",
                "install the extra: pip install 'instar[hf]'",
            ) from None
        with open_source(self.path) as file:
            try:
                table = parquet.ParquetFile(file)
                names = table.schema_arrow.names
                if self.text_field not in names:
                    raise ConfigError.of(
                        f"there is no column {self.text_field!r} (columns: {', '.join(names)})",
                        where=str(self.path),
                        hint="name the column of the text in data.text_field",
                        key="data.text_field",
                    )
                dtype = table.schema_arrow.field(self.text_field).type
                if not is_text(dtype):
                    raise ConfigError.of(
                        f"cannot read column {self.text_field!r} as text: it holds {dtype}",
                        where=str(self.path),
                        hint="name the column of the text in data.text_field",
                        key="data.text_field",
                    )
                for batch in table.iter_batches(_PARQUET_ROWS, columns=[self.text_field]):
                    column = batch.column(0).cast(large_string())
                    yield [text or "" for text in column.to_pylist()]
            except (ArrowException, UnicodeDecodeError, OSError) as error:
                raise ConfigError.of(
                    f"cannot read column {self.text_field!r} as text: {error}", where=str(self.path)
                ) from None


def _clip_documents(
    documents: Iterable[Document], parts: list[Part], text: Callable[[Document], str]
) -> Iterator[Iterator[str]]:
    """Yield the parts of a file's documents, in order; `text` reads one document. Stops reading
    after the last part."""
    ranges = iter(parts)
    part = next(ranges, None)
    for number, document in enumerate(documents):
        while part is not None and part[0] == number:
            yield iter([clip(text(document), part)])
            part = next(ranges, None)
        if part is None:
            return


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _undecodable(path: Path, at: int) -> ConfigError:
    message = f"{path} is not UTF-8 text: byte {at:,} cannot be decoded"
    return ConfigError.at("data.source", message, "convert it, for example with iconv -t UTF-8")


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
