"""What stdout and stderr say where there is nothing but ASCII, and whether stdout can be written."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Mapping
from typing import Any

from instar.config.errors import InstarError

ENCODING = "instar_ascii"
"""A codec of our own: click would open a stream of the codec `ascii` anew, as UTF-8."""


class StdoutFails(InstarError):  # noqa: N818
    """What was to be printed cannot be, and its reader is there: a full disk, mostly."""


def watch_stdout() -> None:
    """Have stdout raise `StdoutFails` where a write fails, so that no other failure is taken for
    one of its own."""
    given: Any = sys.stdout
    if given is not None:
        raw = _Stdout(given.fileno(), "wb", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw),
            given.encoding,
            given.errors,
            line_buffering=given.line_buffering,
            write_through=given.write_through,
        )


def speak_plainly(environment: Mapping[str, str] = os.environ) -> None:
    """Have both streams spell what is not ASCII, where the locale or a stream has no more.

    In the locale C Python itself speaks UTF-8, which such a terminal garbles.
    """
    plain = environment.get("LC_ALL") in ("C", "POSIX")
    streams: list[Any] = [sys.stdout, sys.stderr]
    for stream in streams:
        encoding = getattr(stream, "encoding", None)
        if hasattr(stream, "reconfigure") and (plain or not _is_unicode(encoding)):
            codecs.register(_codec)
            stream.reconfigure(encoding=ENCODING)


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
    from instar.record.lines import spelt

    return spelt(text).encode("ascii"), len(text)


class _Encoder(codecs.IncrementalEncoder):
    def encode(self, text: str, final: bool = False) -> bytes:  # noqa: ARG002
        return _encode(text)[0]
