"""Tokenizers: bytes, characters, byte-pair encoding (trained, or loaded from a tokenizer.json)."""

from __future__ import annotations

import copy
import difflib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
import xxhash
from tokenizers import decoders, models, pre_tokenizers, trainers

from instar.config.errors import ConfigError
from instar.config.files import read_regular
from instar.data.text.foreign.engine import TokenIds, engine_of
from instar.data.text.foreign.meta_pickle import read_characters
from instar.data.text.foreign.special_tokens import (
    END_FILE,
    TOKENIZER_CONFIG,
    EndToken,
    added_to_text,
    end_token_of,
    with_around,
)

TOKENIZER_FILE = "tokenizer.json"
FORMAT = "instar-tokenizer/1"
END = "<|end|>"
UNKNOWN = "<unk>"
SEPARATOR = "\n"
"""The text between two documents if there is no end-of-document token."""

PICKLED = ".pkl"
"""Ending of a vocabulary that nanoGPT has pickled."""
TRAINED = ("byte", "char", "bpe")
"""The values of `data.tokenizer` other than a file."""

_PIECE_CHARACTERS = 1 << 20
_LONG_RUN = re.compile(r"(?<!\w)\w{1025,}|(?<![^\w\s])[^\w\s]{1025,}|(?<!\s)\s{1025,}")
_WORD_CHARACTERS = 128

_NONE: TokenIds = np.empty(0, dtype=np.uint32)


class Tokenizer(ABC):
    """Encodes text to tokens and decodes them.

    `end_id` and `end_token` are the end-of-document token, if there is one; `before` and `after` are the tokens that
    the tokenizer itself adds to a text, such as the beginning-of-sequence token.
    """

    kind: str
    """byte, char or bpe"""
    before: TokenIds = _NONE
    after: TokenIds = _NONE

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    def end_id(self) -> int | None:
        return None

    @property
    def end_token(self) -> str | None:
        return None

    @property
    def fingerprint(self) -> str:
        """The xxh3-128 of what decides the tokens of a text."""
        return xxhash.xxh3_128_hexdigest(self.to_json().encode())

    @abstractmethod
    def encode(self, text: str) -> TokenIds:
        """Return the tokens of a text, with those that the tokenizer adds to it."""

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the tokens of pieces of texts, to which nothing is added."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str: ...

    @abstractmethod
    def to_json(self) -> str: ...


@dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as tokens; vocabulary of 256."""

    kind = "byte"
    vocab_size = 256

    def encode(self, text: str) -> TokenIds:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(token) for token in ids).decode("utf-8", "replace")

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "kind": self.kind})


@dataclass(frozen=True)
class CharTokenizer(Tokenizer):
    """The sorted characters of the training text, followed by a token for all others unless it is `closed`."""

    characters: str
    closed: bool = False
    """whether there are no others, as with a vocabulary of nanoGPT"""

    kind = "char"

    @property
    def vocab_size(self) -> int:
        return len(self.names)

    @property
    def names(self) -> list[str]:
        """The text of each token."""
        return [*self.characters, *([] if self.closed else [UNKNOWN])]

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
        if self.closed and (ids == len(self.characters)).any():
            unknown = chr(codes[ids == len(self.characters)][0])
            raise ConfigError.at(
                "data.tokenizer",
                f"{unknown!r} is not among the {len(self.characters):,} characters of the vocabulary",
                "leave it out of the text: the model has no token for it",
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        names = self.names
        return "".join(names[token] for token in ids)

    def to_json(self) -> str:
        content = {"format": FORMAT, "kind": self.kind, "characters": self.characters}
        return json.dumps({**content, **({"closed": True} if self.closed else {})})


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding, or any other model saved as JSON by the `tokenizers` library.

    Special tokens are never parsed in text: "<|end|>" in a document is seven characters. Each text
    is encoded whole and separately; truncation and padding in the file are ignored. `encode` adds what the
    file's post-processor adds to a text, as transformers does. `engine` runs the library.
    """

    kind = "bpe"

    def __init__(self, text: str) -> None:
        """Parse the JSON. Raises any exception of the parser."""
        self._text = text
        content = json.loads(text)
        self.engine = engine_of(text, content)
        added_tokens = content.get("added_tokens") or ()
        self.added_tokens = tuple(token["content"] for token in added_tokens)
        self.special = tuple(token["content"] for token in added_tokens if token.get("special"))
        before, after = added_to_text(content.get("post_processor"))
        self.before = np.array(before, dtype=np.uint32)
        self.after = np.array(after, dtype=np.uint32)
        self._end = EndToken(END if self.added_tokens == (END,) else None, "no file says it")

    def with_end(self, end: EndToken) -> BPETokenizer:
        """Return this tokenizer with another end-of-document token."""
        other = copy.copy(self)
        other._end = end
        return other

    def surrounded(self, bos: str | None, eos: str | None) -> BPETokenizer:
        """Return this tokenizer with another token before a text, or another that ends a document.

        Where the tokenizer itself ends a text, it does so with `eos`.

        Args:
            bos: empty: none; None: as it is.
            eos: None: as it is.

        Raises:
            ConfigError: there is no such token.
        """
        for key, token in (("data.bos", bos), ("data.eos", eos)):
            if token and token not in self.vocabulary:
                near = difflib.get_close_matches(token, self.added_tokens, cutoff=0.5)
                known = ", ".join(near or self.added_tokens[:8]) or "none is added to its words"
                raise ConfigError.at(
                    key, f"{token!r} is no token of the tokenizer", f"special tokens: {known}"
                )
        before, after = self.before.tolist(), self.after.tolist()
        if bos is not None:
            before = [self.vocabulary[bos]] if bos else []
        if eos is not None and after:
            after = [self.vocabulary[eos]]
        other = self
        if (before, after) != (self.before.tolist(), self.after.tolist()):
            names = {number: token for token, number in self.vocabulary.items()}
            content = json.loads(self._text)
            sides = ({names[number]: number for number in side} for side in (before, after))
            content["post_processor"] = with_around(content.get("post_processor"), *sides)
            other = BPETokenizer(json.dumps(content, ensure_ascii=False))
        return other.with_end(self._end if eos is None else EndToken(eos))

    @property
    def bos(self) -> str | None:
        """The token before a text, empty if there is none; None if there are several."""
        if self.before.size > 1:
            return None
        names = {number: token for token, number in self.vocabulary.items()}
        return names[int(self.before[0])] if self.before.size else ""

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, added tokens included."""
        return self.engine.vocabulary()

    @cached_property
    def vocab_size(self) -> int:
        """The largest id + 1: ids may have gaps."""
        return max(self.vocabulary.values(), default=-1) + 1

    @property
    def fingerprint(self) -> str:
        """Of the file, and of what surrounds a text."""
        around = ""
        if self.before.size or self.after.size or self.end_token not in (None, END):
            around = json.dumps([self.before.tolist(), self.after.tolist(), self.end_token])
        return xxhash.xxh3_128_hexdigest((self._text + around).encode())

    @property
    def end_token(self) -> str | None:
        """The end-of-document token of `train_bpe`, or the one that the files beside the tokenizer name."""
        return self._end.token

    @property
    def end_id(self) -> int | None:
        return None if self.end_token is None else self.vocabulary[self.end_token]

    @property
    def needs_end_file(self) -> bool:
        """Whether its file alone does not say which token ends a document."""
        return self.end_token is not None and self.added_tokens != (END,)

    @property
    def missing_end(self) -> str:
        """Why no end-of-document token is known of a tokenizer with special tokens; empty if one is, or if it
        has no such tokens."""
        return self._end.missing if self._end.token is None and self.added_tokens else ""

    def encode(self, text: str) -> TokenIds:
        return np.concatenate([self.before, *self.encode_batch([text]), self.after])

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        well_formed = [text.encode("utf-8", "replace").decode() for text in texts]
        return self.engine.encode(well_formed)

    def decode(self, ids: Iterable[int]) -> str:
        return self.engine.decode([int(token) for token in ids])

    def to_json(self) -> str:
        return self._text


def prompt_tokens(tokenizer: Tokenizer, text: str) -> TokenIds:
    """Return the tokens of a text that goes on: without those that the tokenizer adds after one."""
    return np.concatenate([tokenizer.before, *tokenizer.encode_batch([text])])


def separator_of(tokenizer: Tokenizer) -> TokenIds:
    """Return the tokens between two documents: the end-of-document token, unless the tokenizer itself ends a
    text with it; those of a newline if the tokenizer has no such tokens.

    Raises:
        ConfigError: nothing says which of its tokens ends a document.
    """
    end = tokenizer.end_id
    if tokenizer.after.size and end in (None, tokenizer.after[-1]):
        return _NONE
    if end is not None:
        return np.array([end], dtype=np.uint32)
    if isinstance(tokenizer, BPETokenizer) and tokenizer.missing_end:
        raise ConfigError.at(
            "data.tokenizer",
            f"nothing says which token of the tokenizer ends a document: {tokenizer.missing_end}",
            f'name it in {TOKENIZER_CONFIG} beside its {TOKENIZER_FILE}: {{"eos_token": "…"}}, or in data.eos',
        )
    return tokenizer.encode_batch([SEPARATOR])[0]


def end_of_document(tokenizer: Tokenizer) -> int | None:
    """Return the token that ends each document and is in no text; None if none does.

    Raises:
        ConfigError: as `separator_of`.
    """
    separator = separator_of(tokenizer)
    if tokenizer.end_id is not None and separator.size:
        return tokenizer.end_id
    return int(tokenizer.after[-1]) if tokenizer.after.size else None


def surroundings(tokenizer: Tokenizer) -> str:
    """Return in words what surrounds a document, e.g. "<bos> … </s>"; raises as `separator_of`."""
    if not isinstance(tokenizer, BPETokenizer):
        return "… newline"
    ids = [*tokenizer.before.tolist(), None, *tokenizer.after.tolist()]
    separator = separator_of(tokenizer).tolist()
    ids += separator if tokenizer.end_id is not None else []
    texts = {number: text for text, number in tokenizer.vocabulary.items()}
    words = ["…" if number is None else texts.get(number, str(number)) for number in ids]
    words += ["newline"] if separator and tokenizer.end_id is None else []
    return " ".join(words)


def in_pieces(texts: Iterable[str]) -> Iterator[str]:
    """Split a document, given in any pieces, into the pieces that are encoded separately.

    They have at most 2^20 characters and end at a line end where possible. So the tokens of a
    document do not depend on how it is read, and a large one takes little memory.
    """
    pending = ""
    for text in texts:
        pending, begin = pending + text, 0
        while len(pending) - begin > _PIECE_CHARACTERS:
            end = begin + _PIECE_CHARACTERS
            cut = pending.rfind("\n", begin, end) + 1 or end
            yield pending[begin:cut]
            begin = cut
        pending = pending[begin:]
    if pending:
        yield pending


def train_char(texts: Iterable[str]) -> CharTokenizer:
    """Return a tokenizer of the characters that occur in the texts."""
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    return CharTokenizer("".join(sorted(characters)))


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Train byte-level BPE with at most vocab_size tokens (fewer if the text is too short).

    Sennrich, Haddow and Birch, 2016, on bytes as in GPT-2. A run of more than 1,024 letters, signs or spaces is
    cut into words of 128, since the time of training grows with the square of a word's length.

    Raises ConfigError if vocab_size is too small for the 256 bytes and the end token.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise ConfigError.at(
            "data.vocab_size",
            f"vocab_size of a bpe tokenizer must be at least {len(alphabet) + 1} "
            f"(256 bytes and {END}), got {vocab_size}",
        )
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(_in_words(texts), trainer)
    return BPETokenizer(model.to_str())


def _in_words(texts: Iterable[str]) -> Iterator[str]:
    """Cut texts where they have no words."""
    for text in texts:
        begin = 0
        for run in _LONG_RUN.finditer(text):
            for at in range(run.start() + _WORD_CHARACTERS, run.end(), _WORD_CHARACTERS):
                yield text[begin:at]
                begin = at
        yield text[begin:]


def load_saved_tokenizer(folder: str | Path, *, fingerprint: str | None = None) -> Tokenizer:
    """Load the tokenizer saved as tokenizer.json in the folder of a data set or a checkpoint.

    Raises ConfigError if it is missing, unreadable, or has another fingerprint.
    """
    file = Path(folder) / TOKENIZER_FILE
    tokenizer = _read(file)
    if fingerprint is not None and tokenizer.fingerprint != fingerprint:
        raise ConfigError.of(
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
        raise ConfigError.at(
            "data.tokenizer",
            f"no tokenizer: {missing}",
            f"give {', '.join(TRAINED)}, the path of a {TOKENIZER_FILE} or a folder with one, or nanoGPT's meta.pkl",
        )
    return file


def folder_of(name: str) -> Path | None:
    """Return the folder with the files beside the one that `data.tokenizer` names; None for a kind to train."""
    path = Path(name)
    return None if name in TRAINED else path if path.is_dir() else path.parent


def named_tokenizer(name: str, bos: str | None = None, eos: str | None = None) -> Tokenizer | None:
    """Return the tokenizer that `data.tokenizer` names, None if it must be trained.

    Args:
        bos: `data.bos`, and so `eos`; see `BPETokenizer.surrounded`.

    Raises:
        ConfigError: it names nothing, or a file that is not a tokenizer, or one without these tokens.
    """
    if name == "byte":
        return ByteTokenizer()
    file = named_file(name)
    tokenizer = None if file is None else _read(file)
    return tokenizer.surrounded(bos, eos) if isinstance(tokenizer, BPETokenizer) else tokenizer


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files that `load_tokenizer` reads: the tokenizer's, and one that names its end-of-document token
    if the former does not."""
    files = {TOKENIZER_FILE: tokenizer.to_json()}
    if isinstance(tokenizer, BPETokenizer) and tokenizer.needs_end_file:
        files[END_FILE] = json.dumps({"eos_token": tokenizer.end_token})
    return {name: content.encode() for name, content in files.items()}


def _read(file: Path) -> Tokenizer:
    try:
        content = read_regular(file, follow=True)
    except FileNotFoundError:
        raise ConfigError.of("there is no tokenizer here", where=str(file)) from None
    except OSError as error:
        raise ConfigError.of(f"cannot be read: {error.strerror}", where=str(file)) from error
    try:
        if file.suffix == PICKLED:
            return CharTokenizer(read_characters(content), closed=True)
        tokenizer = parse_tokenizer(content.decode("utf-8"))
    except ConfigError as error:
        raise ConfigError.of(error.problems[0].message, where=str(file)) from None
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ConfigError.of(f"not a saved tokenizer: {error}", where=str(file)) from None
    if not isinstance(tokenizer, BPETokenizer) or tokenizer.end_token is not None:
        return tokenizer
    end = end_token_of(file.parent, tokenizer.vocabulary, tokenizer.added_tokens, follow=True)
    return tokenizer.with_end(end)


def parse_tokenizer(text: str) -> Tokenizer:
    """Parse a tokenizer.json. Raises any exception of the parser."""
    match json.loads(text):
        case {"model": dict()}:
            return BPETokenizer(text)
        case {"format": "instar-tokenizer/1", "kind": "byte"}:
            return ByteTokenizer()
        case {
            "format": "instar-tokenizer/1",
            "kind": "char",
            "characters": str(characters),
        } as content:
            return CharTokenizer(characters, closed=content.get("closed") is True)
    raise ValueError(f"neither {FORMAT} nor one of the tokenizers library")
