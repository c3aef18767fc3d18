"""A pickled vocabulary is read without running anything of it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nano_gpt import TEXT, write_data

from instar.config.errors import ConfigError
from instar.data.text.foreign.meta_pickle import MOST_BYTES, read_characters, read_plain
from instar.data.text.tokenizer import BPETokenizer, named_tokenizer, parse_tokenizer
from instar.models.hf.tokenizer import from_fast, to_fast

CHARACTERS = "\n !azé→𝄞"
META = {
    "vocab_size": len(CHARACTERS),
    "itos": dict(enumerate(CHARACTERS)),
    "stoi": {character: number for number, character in enumerate(CHARACTERS)},
}
PLAIN = [{"a": [1, -2, 2**40, 2**900, 1.5, True, None]}, (1, (2, 3), [], ()), {3: {4: [5] * 3000}}]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_gives_the_values_of_pickle(protocol: int) -> None:
    assert read_characters(pickle.dumps(META, protocol=protocol)) == CHARACTERS
    for value in (*PLAIN, META):
        content = pickle.dumps(value, protocol=protocol)
        assert read_plain(content) == pickle.loads(content) == value  # noqa: S301


class Program:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def meta(**changes: object) -> bytes:
    return pickle.dumps({**META, **changes})


def doubling_list(times: int) -> list[Any]:
    """A list that holds one list twice, which does too, and so on: short as a pickle, endless as text."""
    value: list[Any] = []
    for _ in range(times):
        value = [value, value]
    return value


HOSTILE = {
    "a program": (pickle.dumps(Program()), "the name posix.system, which is never run"),
    "a program within": (meta(itos=Program()), "the name posix.system"),
    "a program of protocol 0": (pickle.dumps(Program(), 0), "the name posix.system"),
    "an array": (meta(vocab_size=np.int64(3)), "the name numpy"),
    "an extension": (b"\x80\x02\x82\x01.", "the opcode EXT1"),
    "an object of elsewhere": (b"\x80\x02U\x03abcQ.", "the opcode"),
    "no pickle": (b"{'stoi': {}}", "damaged|opcode"),
    "nothing": (b"", "no end|damaged|exhausted"),
    "a cut file": (meta()[:-9], "end|damaged|exhausted|expected"),
    "a text": (pickle.dumps("abc"), "no `stoi`"),
    "words": (meta(stoi={"ab": 0, "c": 1}), "other lengths than one character"),
    "a gap": (meta(stoi={"a": 0, "b": 2}), "not 0, 1, 2, …, each once"),
    "an id twice": (meta(stoi={"a": 0, "b": 0}), "not 0, 1, 2, …, each once"),
    "true for an id": (meta(stoi={"a": False, "b": True}), "no whole numbers"),
    "another size": (meta(vocab_size=3), "`vocab_size` is 3, and `stoi` has 8 characters"),
    "items of a number": (b"\x80\x02K\x01(K\x01K\x02u.", "damaged"),
    "more than there is": (b"\x80\x02\x87.", "damaged"),
    "memory of nothing": (b"\x80\x02h\x05.", "damaged"),
    "keys that are nested": (b"\x80\x02})" + b"\x85" * 100_000 + b"K\x01s.", "a key is a tuple"),
    "a size of lists within lists": (
        meta(vocab_size=doubling_list(60)),
        "`vocab_size` is a list, and `stoi` has 8 characters",
    ),
    "a size nested deep": (
        pickle.dumps({**META, "vocab_size": 0})[:-4] + b"]" * 9000 + b"a" * 8999 + b"u.",
        "vocab_size|damaged",
    ),
    "a large size": (meta(vocab_size=10**500), "`vocab_size` is a int"),
    "half a character": (meta(stoi={"\ud800": 0}, vocab_size=1), "halves of characters"),
    "keys of one hash": (
        pickle.dumps({n * (2**61 - 1): 0 for n in range(1, 100)}),
        "a key is a int, no text or small number",
    ),
    "a large file": (b"\x80\x02" + b"]" * MOST_BYTES, "more than 4,194,304"),
    "digits without end": (b"I" + b"9" * 1_000_000 + b"\n.", "damaged|digits"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_vocabulary_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, message = HOSTILE[kind]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_characters(content)
    Path("meta.pkl").write_bytes(content)
    with pytest.raises(ConfigError, match=r"meta\.pkl"):
        named_tokenizer("meta.pkl")
    assert [path.name for path in tmp_path.iterdir()] == ["meta.pkl"]


@pytest.mark.torture
def test_the_largest_pickle_is_read() -> None:
    assert read_plain(b"\x80\x02" + b"]" * (MOST_BYTES - 3) + b".") == []


def test_the_vocabulary_has_no_token_for_other_characters(tmp_path: Path) -> None:
    tokenizer = named_tokenizer(str(write_data(tmp_path) / "meta.pkl"))
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.vocab_size == len(set(TEXT))
    with pytest.raises(ConfigError, match="'Q' is not among the 24 characters of the vocabulary"):
        tokenizer.encode("sQuared")
    assert parse_tokenizer(tokenizer.to_json()) == tokenizer
    assert from_fast(BPETokenizer(to_fast(tokenizer))) == tokenizer
