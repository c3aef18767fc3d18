"""Iterables of documents, each with something wrong in it; `data.source` names one of these."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

DOCUMENTS = 300
"""of a pass; some 650 samples of 16 tokens"""
WRONG = 150
"""the item that is wrong"""
WAITING = "waiting for data"
ANSWERS = "the-server-answers"
"""a file: once it is there, nothing blocks"""
_passes = 0


def document(number: int) -> str:
    return f"{number} squared is {number * number} and so on\n"


def texts() -> Iterator[str]:
    """Nothing is wrong with these."""
    return map(document, range(DOCUMENTS))


def raises() -> Iterator[str]:
    """As from a database that is gone."""
    yield from map(document, range(WRONG))
    raise ConnectionError("the database is gone")


def ends_early() -> Iterator[str]:
    """Every pass after the first is shorter."""
    global _passes
    _passes += 1
    return map(document, range(DOCUMENTS if _passes == 1 else WRONG))


def begins_otherwise() -> Iterator[str]:
    """Every pass has its documents in another order."""
    global _passes
    _passes += 1
    return map(document, range(_passes, DOCUMENTS))


def blocks() -> Iterator[str]:
    """As from a server that does not answer; it says so on the terminal once it waits."""
    yield from map(document, range(WRONG))
    _wait_for_ever()
    yield from map(document, range(WRONG, DOCUMENTS))


def blocks_at_once() -> Iterator[str]:
    """The very first item never comes."""
    _wait_for_ever()
    yield from texts()


def blocks_when_called() -> Iterator[str]:
    """Not even the iterator comes."""
    _wait_for_ever()
    return texts()


def holds_nothing() -> Iterator[Any]:
    return _with(None)


def holds_a_number() -> Iterator[Any]:
    return _with(7)


def lacks_a_field() -> Iterator[dict[str, str]]:
    for number in range(DOCUMENTS):
        yield {"title" if number == WRONG else "text": document(number)}


def ids() -> Iterator[dict[str, Any]]:
    """Token ids; one of them is not in a vocabulary of bytes."""
    for number in range(DOCUMENTS):
        tokens = np.frombuffer(document(number).encode(), np.uint8).astype(np.int64)
        yield {"tokens": tokens + 1000 if number == WRONG else tokens}


def _with(wrong: object) -> Iterator[Any]:
    return (wrong if number == WRONG else document(number) for number in range(DOCUMENTS))


def _wait_for_ever() -> None:
    """Or not at all, once it is said that the server answers again."""
    if Path(ANSWERS).exists():
        return
    os.write(_TERMINAL, f"{WAITING}\n".encode())
    threading.Event().wait()


_TERMINAL = os.dup(1)
"""that this process was started on"""
