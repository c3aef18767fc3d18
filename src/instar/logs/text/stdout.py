"""Text on stdout and stderr: encoding, escapes, ASCII fallback, failed writes, and the layout of lines and tables.

Imports little, because fast commands use it too.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from instar.config.errors import InstarError, visible

ENCODING = "instar_ascii"
"""A custom codec name: click would reopen a stream of the codec `ascii` as UTF-8."""
_GAP = "  "


class StdoutFails(InstarError):  # noqa: N818
    """Writing to stdout failed although its reader exists: mostly a full disk."""


def watch_streams() -> None:
    """Escape control characters in all output to stdout and stderr, see `visible`: text of a record
    or a log may contain terminal escapes. Also make stdout raise `StdoutFails` if a write fails, so
    that other errors are not mistaken for it."""
    if sys.stdout is not None:
        sys.stdout = _visible(sys.stdout, _Stdout)
    if sys.stderr is not None:
        sys.stderr = _visible(sys.stderr, io.FileIO)


def _visible(stream: Any, kind: type[io.FileIO]) -> _Visible:
    return _Visible(
        io.BufferedWriter(kind(stream.fileno(), "wb", closefd=False)),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Visible(io.TextIOWrapper):
    is_filtered = True

    def write(self, text: str) -> int:
        super().write(visible(text) if self.is_filtered else text)
        return len(text)


def set_encoding() -> None:
    """Encode output as ASCII on both streams if the locale or the stream does not support Unicode.

    In the locale C, Python uses UTF-8, which such a terminal garbles.
    """
    plain = os.environ.get("LC_ALL") in ("C", "POSIX")
    streams: list[Any] = [sys.stdout, sys.stderr]
    for stream in streams:
        encoding = getattr(stream, "encoding", None)
        if not hasattr(stream, "reconfigure"):
            continue
        if plain or not _is_unicode(encoding):
            codecs.register(_codec)
            stream.reconfigure(encoding=ENCODING)
        elif stream.errors == "strict":
            stream.reconfigure(errors="surrogateescape")  # file names need not be UTF-8


class _Stdout(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise StdoutFails(f"cannot write to stdout: {error.strerror}") from None


def _is_unicode(encoding: str | None) -> bool:
    return encoding is not None and codecs.lookup(encoding).name.startswith("utf")


def _codec(name: str) -> codecs.CodecInfo | None:
    if name != ENCODING:
        return None
    return codecs.CodecInfo(
        _encode, codecs.lookup("ascii").decode, incrementalencoder=_Encoder, name=ENCODING
    )


def _encode(text: str, errors: str = "strict") -> tuple[bytes, int]:  # noqa: ARG001
    from instar.record.format import to_ascii

    return to_ascii(text).encode("ascii"), len(text)


class _Encoder(codecs.IncrementalEncoder):
    def encode(self, text: str, final: bool = False) -> bytes:  # noqa: ARG002
        return _encode(text)[0]


def align_columns(
    rows: Sequence[Sequence[str]], right: Collection[int] = (), width: int | None = None
) -> list[str]:
    """Return lines of aligned cells; the columns `right`, from 0, are right-aligned.

    Columns beyond `width` follow in further tables, each of which repeats the first column.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for columns in _that_fit(widths, width):
        lines += [""] if lines else []
        lines += [
            _GAP.join(
                row[n].rjust(widths[n]) if n in right else row[n].ljust(widths[n]) for n in columns
            ).rstrip()
            for row in rows
        ]
    return lines


def columns_that_fit(
    headers: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str], width: int
) -> list[int]:
    """Return the indices of the columns of a table that is at most `width` wide, as far as leaving
    out optional ones, named in this order, makes it so."""
    widths = {n: max(map(len, column)) for n, column in enumerate(zip(headers, *rows, strict=True))}
    for header in optional:
        if sum(widths.values()) + len(_GAP) * (len(widths) - 1) <= width:
            break
        widths.pop(headers.index(header))
    return list(widths)


def indent_text(text: str, depth: int) -> str:
    """Return the name of a branch of a tree: `└ name`."""
    return f"{'  ' * (depth - 1)}└ {text}" if depth else text


def wrap_line(line: str, width: int | None, indent: str = "    ") -> list[str]:
    """Wrap a line at `width`; words are not split."""
    if width is None or len(line) <= width:
        return [line]
    return textwrap.wrap(
        line,
        max(width, 2 * len(indent)),
        subsequent_indent=indent,
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _that_fit(widths: Sequence[int], limit: int | None) -> Iterator[list[int]]:
    """Yield the indices of the columns of each table."""
    columns, used = [0], widths[0]
    for number, width in enumerate(widths[1:], 1):
        if limit is not None and used + len(_GAP) + width > limit and len(columns) > 1:
            yield columns
            columns, used = [0], widths[0]
        columns.append(number)
        used += len(_GAP) + width
    yield columns


def markdown_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> list[str]:
    """Return a table in Markdown; `right`: right-aligned columns, from 0."""
    rule = ["---:" if number in right else "---" for number in range(len(headers))]
    return [f"| {' | '.join(cells)} |" for cells in (headers, rule, *rows)]
