"""Tokenizers: bytes, characters, byte-pair encoding (trained, or loaded from a tokenizer.json)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
import xxhash
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from instar.config.errors import ConfigError
from instar.config.files import read_regular

TOKENIZER_FILE = "tokenizer.json"
FORMAT = "instar-tokenizer/1"
END = "<|end|>"
UNKNOWN = "<unk>"
SEPARATOR = "\n"
"""The text between two documents if there is no end-of-document token."""

TRAINED = ("byte", "char", "bpe")
"""The values of `data.tokenizer` other than a file."""

_ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_PIECE_CHARACTERS = 1 << 20

TokenIds = NDArray[np.uint32]


class Tokenizer(Protocol):
    """Encodes text to tokens and decodes them.

    `kind` is byte, char or bpe; `fingerprint` is the xxh3-128 of the saved JSON; `end_id` and
    `end_token` are the end-of-document token, if there is one.
    """

    @property
    def kind(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def end_id(self) -> int | None: ...
    @property
    def end_token(self) -> str | None: ...

    def encode(self, text: str) -> TokenIds: ...

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def to_json(self) -> str: ...


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as tokens; vocabulary of 256."""

    kind = "byte"
    vocab_size = 256
    end_id = None
    end_token = None

    @property
    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.to_json().encode())

    def encode(self, text: str) -> TokenIds:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(token) for token in ids).decode("utf-8", "replace")

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "kind": self.kind})


@dataclass(frozen=True)
class CharTokenizer:
    """The sorted characters of the training text, followed by a token for all others."""

    characters: str

    kind = "char"
    end_id = None
    end_token = None

    @property
    def vocab_size(self) -> int:
        return len(self.characters) + 1

    @property
    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.to_json().encode())

    @cached_property
    def _id_of_code_point(self) -> TokenIds:
        codes = np.array([ord(character) for character in self.characters], dtype=np.int64)
        table = np.full(int(codes.max(initial=0)) + 2, len(self.characters), dtype=np.uint32)
        table[codes] = np.arange(codes.size, dtype=np.uint32)
        return table

    def encode(self, text: str) -> TokenIds:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        table = self._id_of_code_point
        ids: TokenIds = table[np.minimum(codes, table.size - 1)]
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        names = [*self.characters, UNKNOWN]
        return "".join(names[token] for token in ids)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "kind": self.kind, "characters": self.characters})


class BPETokenizer:
    """Byte-level byte-pair encoding, or any other model saved as JSON by the `tokenizers` library.

    Special tokens are never parsed in text: "<|end|>" in a document is seven characters. Each text
    is encoded whole and separately; truncation and padding in the file are ignored.
    """

    kind = "bpe"

    def __init__(self, saved: str) -> None:
        self._saved = saved
        self._model = tokenizers.Tokenizer.from_str(saved)
        self._model.encode_special_tokens = True
        self._model.no_truncation()
        self._model.no_padding()

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, added tokens included."""
        found: dict[str, int] = self._model.get_vocab(with_added_tokens=True)
        return found

    @cached_property
    def vocab_size(self) -> int:
        """The largest id + 1: ids may have gaps."""
        return max(self.vocabulary.values(), default=-1) + 1

    @property
    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(self._saved.encode())

    @property
    def end_token(self) -> str | None:
        """This package's end-of-document token, or a common name of it in other tokenizers."""
        return next((end for end in _ENDS if self._model.token_to_id(end) is not None), None)

    @property
    def end_id(self) -> int | None:
        if (end := self.end_token) is None:
            return None
        found: int | None = self._model.token_to_id(end)
        return found

    def encode(self, text: str) -> TokenIds:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        well_formed = [text.encode("utf-8", "replace").decode() for text in texts]
        encoded = self._model.encode_batch_fast(well_formed, add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._model.decode([int(token) for token in ids], skip_special_tokens=False)
        return text

    def to_json(self) -> str:
        return self._saved


def separator_of(tokenizer: Tokenizer) -> TokenIds:
    """Return the tokens between two documents: the end-of-document token, or those of a newline."""
    end = tokenizer.end_id
    return tokenizer.encode(SEPARATOR) if end is None else np.array([end], dtype=np.uint32)


def token_bytes(tokenizer: Tokenizer) -> NDArray[np.int64] | None:
    """Return how many bytes of UTF-8 text each token stands for, [vocab_size]; None if unknown.

    They are known of bytes, of characters (one that the tokenizer does not know counts as 1), and
    of byte-level BPE, whose special tokens such as the end of a document stand for none.
    """
    if isinstance(tokenizer, CharTokenizer):
        return np.array([*(len(c.encode()) for c in tokenizer.characters), 1], dtype=np.int64)
    if not isinstance(tokenizer, BPETokenizer):
        return np.ones(tokenizer.vocab_size, dtype=np.int64)
    saved = json.loads(tokenizer.to_json())
    if (saved.get("decoder") or {}).get("type") != "ByteLevel" or saved["model"].get(
        "type"
    ) != "BPE":
        return None
    added = {each["content"]: each for each in saved.get("added_tokens", ())}
    found = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for token, number in tokenizer.vocabulary.items():
        # in byte-level BPE, each character of a token is a byte; added tokens are literal text
        size = len(token) if token not in added else len(token.encode())
        found[number] = 0 if added.get(token, {}).get("special") else size
    return found


def in_pieces(texts: Iterable[str]) -> Iterator[str]:
    """Split a document, given in any pieces, into the pieces that are encoded separately.

    They have at most 2^20 characters and end at a line end where possible. So the tokens of a
    document do not depend on how it is read, and a large one takes little memory.
    """
    held = ""
    for text in texts:
        held, begin = held + text, 0
        while len(held) - begin > _PIECE_CHARACTERS:
            end = begin + _PIECE_CHARACTERS
            cut = held.rfind("\n", begin, end) + 1 or end
            yield held[begin:cut]
            begin = cut
        held = held[begin:]
    if held:
        yield held


def train_char(texts: Iterable[str]) -> CharTokenizer:
    """Return a tokenizer of the characters that occur in the texts."""
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    return CharTokenizer("".join(sorted(characters)))


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Train byte-level BPE with at most vocab_size tokens (fewer if the text is too short).

    Sennrich, Haddow and Birch, 2016, on bytes as in GPT-2. Raises ConfigError if vocab_size is too
    small for the 256 bytes and the end token.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise ConfigError.one(
            f"vocab_size of a bpe tokenizer must be at least {len(alphabet) + 1} "
            f"(256 bytes and {END}), got {vocab_size}",
            where="data.vocab_size",
            key="data.vocab_size",
        )
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return BPETokenizer(model.to_str())


def load_tokenizer(folder: str | Path, *, fingerprint: str | None = None) -> Tokenizer:
    """Load the tokenizer saved as tokenizer.json in the folder of a data set or a checkpoint.

    Raises ConfigError if it is missing, unreadable, or has another fingerprint.
    """
    file = Path(folder) / TOKENIZER_FILE
    tokenizer = _read(file)
    if fingerprint is not None and tokenizer.fingerprint != fingerprint:
        raise ConfigError.one(
            f"this is not the tokenizer that made the tokens: fingerprint "
            f"{tokenizer.fingerprint}, recorded {fingerprint}",
            where=str(file),
        )
    return tokenizer


def named_file(name: str) -> Path | None:
    """Return the file that `data.tokenizer` names, also by its folder; None for a kind to train.

    Raises ConfigError if it is neither byte, char or bpe nor a file.
    """
    if name in TRAINED:
        return None
    path = Path(name)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        missing = f"the folder {name} has no {TOKENIZER_FILE}" if path.is_dir() else repr(name)
        raise ConfigError.one(
            f"no tokenizer: {missing}",
            where="data.tokenizer",
            hint=f"give {', '.join(TRAINED)}, the path of a {TOKENIZER_FILE} or a folder with one",
            key="data.tokenizer",
        )
    return file


def folder_of(name: str) -> Path | None:
    """Return the folder with the files beside the one that `data.tokenizer` names; None for a kind to train."""
    path = Path(name)
    return None if name in TRAINED else path if path.is_dir() else path.parent


def named_tokenizer(name: str) -> Tokenizer | None:
    """Return the tokenizer that `data.tokenizer` names, None if it must be trained.

    Raises ConfigError if it names nothing, or a file that is not a tokenizer.
    """
    if name == "byte":
        return ByteTokenizer()
    file = named_file(name)
    return None if file is None else _read(file)


def _read(file: Path) -> Tokenizer:
    try:
        saved = read_regular(file, follow=True)
    except FileNotFoundError:
        raise ConfigError.one("there is no tokenizer here", where=str(file)) from None
    except OSError as error:
        raise ConfigError.one(f"cannot be read: {error.strerror}", where=str(file)) from error
    try:
        return from_json(saved.decode("utf-8"))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ConfigError.one(f"not a saved tokenizer: {error}", where=str(file)) from None


def from_json(saved: str) -> Tokenizer:
    """Parse a tokenizer.json. Raises any exception of the parser."""
    match json.loads(saved):
        case {"model": dict()}:
            return BPETokenizer(saved)
        case {"format": "instar-tokenizer/1", "kind": "byte"}:
            return ByteTokenizer()
        case {"format": "instar-tokenizer/1", "kind": "char", "characters": str(characters)}:
            return CharTokenizer(characters)
    raise ValueError(f"neither {FORMAT} nor one of the tokenizers library")
