from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.config.errors import ConfigError
from instar.data.tokenizer import (
    END,
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
    train_char,
)

TEXTS = ["def grow(self):\n    return self.size * 2\n", "naïve café, 再见\n"] * 20


def all_kinds() -> list[Tokenizer]:
    return [ByteTokenizer(), train_char(TEXTS), train_bpe(TEXTS, 300)]


@pytest.mark.parametrize("tokenizer", all_kinds(), ids=lambda one: one.kind)
def test_training_text_comes_back(tokenizer: Tokenizer) -> None:
    for text in TEXTS[:2]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids.tolist()) == text
        assert ids.max() < tokenizer.vocab_size


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_from_bytes_and_bpe(text: str) -> None:
    for tokenizer in (ByteTokenizer(), BPE):
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


BPE = train_bpe(TEXTS, 300)


@pytest.mark.parametrize("tokenizer", all_kinds(), ids=lambda one: one.kind)
def test_a_lone_surrogate_is_no_accident(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\udc80b").size == 3


@pytest.mark.parametrize("tokenizer", all_kinds(), ids=lambda one: one.kind)
def test_nothing_is_no_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("").size == 0
    assert tokenizer.decode([]) == ""


def test_half_a_character_decodes_to_a_replacement() -> None:
    assert ByteTokenizer().decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


def test_characters_are_sorted_and_the_unknown_comes_last() -> None:
    tokenizer = train_char(["cab", "b"])
    assert tokenizer.characters == "abc"
    assert tokenizer.vocab_size == 4
    assert tokenizer.encode("bad再").tolist() == [1, 0, 3, 3]
    assert tokenizer.decode([1, 3]) == "b<unk>"


def test_bpe_takes_no_text_for_its_end_token() -> None:
    assert BPE.end_id is not None
    ids = BPE.encode(f"one{END}two").tolist()
    assert BPE.end_id not in ids
    assert BPE.decode(ids) == f"one{END}two"
    assert BPE.decode([BPE.end_id]) == END


def test_bpe_merges_what_is_frequent() -> None:
    assert BPE.encode("self").size < 4


def test_training_bpe_twice_gives_the_same() -> None:
    assert train_bpe(TEXTS, 300).to_json() == train_bpe(iter(TEXTS), 300).to_json()


def test_bpe_of_little_text_has_a_small_vocabulary() -> None:
    assert train_bpe(["ab ab"], 4096).vocab_size < 262


@pytest.mark.parametrize("vocab_size", [1, 256])
def test_bpe_needs_room_for_all_bytes(vocab_size: int) -> None:
    with pytest.raises(ConfigError, match=f"at least 257 .*, got {vocab_size}"):
        train_bpe(TEXTS, vocab_size)


@pytest.mark.parametrize("tokenizer", all_kinds(), ids=lambda one: one.kind)
def test_a_saved_tokenizer_loads_as_it_was(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    loaded = load_tokenizer(tmp_path, fingerprint=tokenizer.fingerprint)
    assert loaded.kind == tokenizer.kind
    assert loaded.vocab_size == tokenizer.vocab_size
    assert loaded.end_id == tokenizer.end_id
    assert loaded.encode("self é").tolist() == tokenizer.encode("self é").tolist()


def test_bpe_is_saved_as_the_tokenizers_library_does() -> None:
    assert json.loads(BPE.to_json())["model"]["type"] == "BPE"


def test_another_tokenizer_than_expected_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    with pytest.raises(ConfigError, match="not the tokenizer that made the tokens"):
        load_tokenizer(tmp_path, fingerprint=BPE.fingerprint)


@pytest.mark.parametrize(
    "saved",
    [
        "",
        "[]",
        "{}",
        '{"format": "x"}',
        '{"format": "instar-tokenizer/1", "kind": "word"}',
        '{"format": "instar-tokenizer/1", "kind": "char", "characters": 3}',
        '{"model": 1}',
        "\ufeff",
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, saved: str) -> None:
    (tmp_path / "tokenizer.json").write_text(saved, encoding="utf-8")
    with pytest.raises(ConfigError, match="not a saved tokenizer"):
        load_tokenizer(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\x80\x04\x95")
    with pytest.raises(ConfigError, match="not a saved tokenizer"):
        load_tokenizer(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: there is no tokenizer here"):
        load_tokenizer(tmp_path)


def test_distinct_tokenizers_have_distinct_fingerprints() -> None:
    made: list[Tokenizer] = [*all_kinds(), train_char(["ab"]), train_bpe(TEXTS, 270)]
    assert len({one.fingerprint for one in made}) == len(made)
    assert isinstance(made[2], BPETokenizer)
