"""Operations that name the folder of a new tokenizer, which is compared with the old one, token by token; torch-free.

Tokens are compared by their bytes, so that byte-level tokenizers and those with `▁` for spaces share what they share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from instar.checkpoint.manifest import CheckpointError, read_json
from instar.config.sections import Operation
from instar.data.text.foreign.engine import engine_of
from instar.data.text.foreign.special_tokens import TOKENIZER_CONFIG
from instar.data.text.tokenizer import TOKENIZER_FILE
from instar.growth.operators import check_growth
from instar.growth.plan import SPECIAL, GrowthError, VocabularyMap
from instar.models.hf.tokenizer import letter

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPARE_IDS = 1024
"""ids that a tokenizer may leave out"""


def with_vocabulary(operation: Operation, home: Path | None) -> Operation:
    """Return the operation with the map of its new tokenizer, if it names one.

    Args:
        home: folder of the old tokenizer, unless the operation says `from`.

    Raises:
        GrowthError: a tokenizer is missing or cannot be read.
    """
    value = operation.value
    if operation.name != "resize_vocab" or not isinstance(value, Mapping):
        return operation
    check_growth(operation)
    old = Path(value["from"]) if "from" in value else home
    if old is None or not (old / TOKENIZER_FILE).is_file():
        raise GrowthError(
            f"resize_vocab: no {TOKENIZER_FILE} of the old tokenizer{f' in {old}' if old else ''}: say from, its folder"
        )
    try:
        vocabulary = map_vocabulary(old, Path(value["tokenizer"]), value.get("rows"))
    except CheckpointError as error:
        raise GrowthError(f"resize_vocab: {error}") from error
    return replace(operation, value=vocabulary)


def map_vocabulary(old: Path, new: Path, rows: int | None = None) -> VocabularyMap:
    """Compare the tokenizers of two folders.

    A token of the new one that the old one does not have is the mean of the pieces that the old one makes of its
    text; special tokens, and what has no pieces, are the mean of all rows.

    Args:
        rows: of the new table, if it is larger than the tokenizer.

    Raises:
        CheckpointError: a folder has no readable `tokenizer.json`, or its ids leave too many out.
    """
    old_vocabulary, other = _Vocabulary(old), _Vocabulary(new)
    if rows is not None and rows < other.size:
        raise CheckpointError(
            f"{new / TOKENIZER_FILE}: {other.size:,} tokens do not fit into {rows:,} rows"
        )
    sources: list[tuple[int, ...]] = [()] * (rows or other.size)
    same_rows: set[int] = set()
    open_rows: dict[int, bytes] = {}
    for number, key in other.keys.items():
        if (source := old_vocabulary.ids.get(key)) is not None:
            sources[number] = (source,)
            same_rows.add(number)
        elif isinstance(key, bytes):
            open_rows[number] = key
    pieces = old_vocabulary.pieces(list(open_rows.values()))
    for number, ids in zip(open_rows, pieces, strict=True):
        sources[number] = ids
    return VocabularyMap(tuple(sources), frozenset(same_rows), other.special_ids())


class _Vocabulary:
    """The tokens of a folder: those of text by their bytes, added ones by their content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.content = read_json(folder / TOKENIZER_FILE, follow=True)
        try:
            self.engine = engine_of(json.dumps(self.content), self.content)
            self.tokens = tokens = self.engine.vocabulary()
        except Exception as error:  # the library raises nothing more special
            raise CheckpointError(f"{folder / TOKENIZER_FILE}: not a tokenizer: {error}") from error
        self.size = max(tokens.values(), default=-1) + 1
        if not 0 < self.size <= 2 * len(tokens) + _SPARE_IDS:
            raise CheckpointError(
                f"{folder / TOKENIZER_FILE}: {len(tokens):,} tokens with ids up to {self.size - 1:,}"
            )
        added_tokens = {token["content"] for token in self.content.get("added_tokens") or ()}
        self.keys: dict[int, str | bytes] = {
            number: token if token in added_tokens else self._bytes(token)
            for token, number in sorted(tokens.items(), key=lambda item: item[1])
        }
        self.ids: dict[str | bytes, int] = {}
        for number, key in self.keys.items():
            self.ids.setdefault(key, number)

    @cached_property
    def _kinds(self) -> set[str]:
        """Types of what splits text and joins tokens."""
        return {*_types(self.content.get("pre_tokenizer")), *_types(self.content.get("decoder"))}

    @cached_property
    def _letters(self) -> dict[str, int]:
        return {letter(byte): byte for byte in range(256)}

    def _bytes(self, token: str) -> bytes:
        if "ByteLevel" in self._kinds and all(letter in self._letters for letter in token):
            return bytes(self._letters[letter] for letter in token)
        if "ByteFallback" in self._kinds and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if self._kinds & {"Metaspace", "Replace"}:
            token = token.replace("▁", " ")
        return token.encode()

    def pieces(self, texts: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Return the ids of the pieces of each text; of one that is no text, those of its bytes."""
        strings = [text.decode(errors="replace") for text in texts]
        unknown = self._unknown()
        try:
            pieces_of_texts = self.engine.parse(strings)
        except Exception as error:  # e.g. of an unknown token, where there is no token for it
            raise CheckpointError(
                f"{self.folder / TOKENIZER_FILE}: cannot encode: {error}"
            ) from error
        return [
            tuple(number for number in ids.tolist() if number != unknown)
            if "\ufffd" not in string
            else tuple(self.ids[key] for key in (bytes([b]) for b in text) if key in self.ids)
            for text, string, (ids, _) in zip(texts, strings, pieces_of_texts, strict=True)
        ]

    def _unknown(self) -> int | None:
        model = self.content.get("model") or {}
        unknown_token = model.get("unk_token")
        number = (
            self.tokens.get(unknown_token)
            if isinstance(unknown_token, str)
            else model.get("unk_id")
        )
        return number if isinstance(number, int) else None

    def special_ids(self) -> dict[str, int]:
        """Return the ids of the special tokens that `tokenizer_config.json` names."""
        about = self.folder / TOKENIZER_CONFIG
        special = read_json(about, follow=True) if about.is_file() else {}
        ids_by_key = {}
        for name in SPECIAL:
            token = special.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            number = self.tokens.get(token) if isinstance(token, str) else None
            if number is not None:
                ids_by_key[f"{name}_id"] = number
        return ids_by_key


def _types(part: Any) -> Iterator[str]:
    """Yield the types of a part of a tokenizer and of those in it."""
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part["type"]
        for value in part.values():
            yield from _types(value)
    elif isinstance(part, list):
        for value in part:
            yield from _types(value)
