"""The tokenizers library: here for files whose parts are all known to be harmless, else in a process with limits.

A file may hold any regular expressions, replacements and tables. With these, the library may panic, abort, take all
memory or never end.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from instar.config.errors import ConfigError
from instar.data.text.foreign.limited import LimitedProcess, RequestFailed

TokenIds = NDArray[np.uint32]
Places = NDArray[np.int64]
"""for each token the characters [begin, end) that it stands for, [n, 2]"""

LIMIT_S = 50
_REQUEST_BYTES = 2 << 20
_BYTE_LEVEL_MODEL = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "fuse_unk": False,
    "byte_fallback": False,
}
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")


class Engine(Protocol):
    """What a saved tokenizer does. Every method raises ConfigError if it fails."""

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the tokens of texts, in which the names of special tokens are text."""
        ...

    def parse(self, texts: Sequence[str]) -> list[tuple[TokenIds, Places]]:
        """Return tokens and their places in texts, in which the names of special tokens are these."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each token, added tokens included."""
        ...


def engine_of(text: str, content: dict[str, Any]) -> Engine:
    """Return an engine for a tokenizer's JSON, which is also given parsed. Raises Exception if it is none."""
    return Local(text) if is_harmless(content) else _limited_engine(text)


def is_harmless(content: dict[str, Any]) -> bool:
    """Return whether a file is byte-level BPE as GPT-2 has it: no expressions, replacements or tables of its own."""
    model = content.get("model") or {}
    split = content.get("pre_tokenizer") or {}
    around = content.get("post_processor")
    vocabulary = model.get("vocab")
    return (
        all(content.get(key) is None for key in ("normalizer", "truncation", "padding"))
        and (around is None or around.get("type") == "ByteLevel")
        and split.get("type") == (content.get("decoder") or {}).get("type") == "ByteLevel"
        and split.get("add_prefix_space") is False
        and _BYTE_LEVEL_MODEL.items() <= model.items()
        and all(not model.get(key) for key in _AFFIXES)
        and isinstance(vocabulary, dict)
        and vocabulary.keys() >= set(ByteLevel.alphabet())
        and all(_is_plain(token) for token in content.get("added_tokens") or ())
    )


def _is_plain(token: Any) -> bool:
    switches = ("single_word", "lstrip", "rstrip")
    return bool(token.get("content")) and not any(token.get(key) for key in switches)


class Local:
    """An engine in this process."""

    def __init__(self, text: str) -> None:
        """Parse the JSON. Raises any exception of the parser."""
        self._fast = tokenizers.Tokenizer.from_str(text)
        self._fast.no_truncation()
        self._fast.no_padding()
        self._fast.post_processor = None  # one that trims offsets leaves whitespace without a place
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        with self._lock:
            self._fast.encode_special_tokens = True
            encodings = self._fast.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def parse(self, texts: Sequence[str]) -> list[tuple[TokenIds, Places]]:
        with self._lock:
            self._fast.encode_special_tokens = False
            encodings = self._fast.encode_batch(texts, add_special_tokens=False)
        return [
            (np.array(encoding.ids, np.uint32), np.array(encoding.offsets, np.int64).reshape(-1, 2))
            for encoding in encodings
        ]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._fast.decode(ids, skip_special_tokens=False)
        return text

    def vocabulary(self) -> dict[str, int]:
        ids: dict[str, int] = self._fast.get_vocab(with_added_tokens=True)
        return ids


class Limited:
    """An engine in a process with limits."""

    def __init__(self, text: str, limit_s: int = LIMIT_S) -> None:
        """Load the JSON. Raises ConfigError if that fails."""
        self.process = LimitedProcess("tokenizer", text.encode("utf-8", "replace"), limit_s)
        try:
            self.process.start()
        except RequestFailed as error:
            raise _failure("load", str(error)) from None

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        return [ids for batch in _in_requests(texts) for ids in self._rows("encode", batch)]

    def parse(self, texts: Sequence[str]) -> list[tuple[TokenIds, Places]]:
        rows = [row for batch in _in_requests(texts) for row in self._rows("parse", batch)]
        thirds = [(row, row.size // 3) for row in rows]
        return [(row[:n], row[n:].astype(np.int64).reshape(-1, 2)) for row, n in thirds]

    def decode(self, ids: Sequence[int]) -> str:
        try:
            content = np.array(ids, dtype=np.uint32).tobytes()
        except OverflowError:
            raise ConfigError.of("ids of tokens are 0 or more and below 2^32") from None
        return self._ask({"ask": "decode"}, content)[1].decode()

    def vocabulary(self) -> dict[str, int]:
        ids: dict[str, int] = json.loads(self._ask({"ask": "vocabulary"}, b"")[1])
        return ids

    def _rows(self, ask: str, texts: Sequence[bytes]) -> list[TokenIds]:
        reply, content = self._ask({"ask": ask, "sizes": [*map(len, texts)]}, b"".join(texts))
        return np.split(np.frombuffer(content, dtype=np.uint32), np.cumsum(reply["counts"])[:-1])

    def _ask(self, request: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            return self.process.ask(request, content)
        except RequestFailed as error:
            raise _failure(request["ask"], str(error)) from None


@lru_cache(maxsize=8)
def _limited_engine(text: str) -> Limited:
    return Limited(text)


_TASKS = {"load": "loaded", "vocabulary": "read", "decode": "used to decode tokens"}


def _failure(ask: str, reason: str) -> ConfigError:
    what = _TASKS.get(ask, "used to encode text")
    return ConfigError.of(f"the tokenizer cannot be {what}: {reason}", where="data.tokenizer")


def _in_requests(texts: Sequence[str]) -> Iterator[list[bytes]]:
    """Split texts, as UTF-8, into requests of a bounded size; a longer text is one of its own."""
    batch: list[bytes] = []
    size = 0
    for text in texts:
        content = text.encode()
        if batch and size + len(content) > _REQUEST_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(content)
        size += len(content)
    if batch:
        yield batch
