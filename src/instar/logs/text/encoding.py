"""Output encoding of stdout and stderr: escapes, ASCII fallback, and detection of failed writes."""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import Any

from instar.config.errors import InstarError, visible

ENCODING = "instar_ascii"
"""A custom codec name: click would reopen a stream of the codec `ascii` as UTF-8."""


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


def encodable(text: str) -> str:
    """Return `text` encodable as UTF-8, which file names need not be."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
