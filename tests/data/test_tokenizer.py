from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from instar.config.errors import ConfigError
from instar.data.text import tokenizer as module
from instar.data.text.targets import token_bytes
from instar.data.text.tokenizer import (
    END,
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    in_pieces,
    load_saved_tokenizer,
    named_tokenizer,
    parse_tokenizer,
    separator_of,
    train_bpe,
    train_char,
)

TEXTS = ["def grow(self):\n    return self.size * 2\n", "naïve café, 再见\n"] * 20


def all_kinds() -> list[Tokenizer]:
    return [ByteTokenizer(), train_char(TEXTS), train_bpe(TEXTS, 300)]


@pytest.mark.parametrize("tokenizer", all_kinds(), ids=lambda example: example.kind)
def test_training_text_comes_back(tokenizer: Tokenizer) -> None:
    for text in TEXTS[:2]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids.tolist()) == text
        assert ids.max() < tokenizer.vocab_size


@pytest.mark.parametrize("tokenizer", all_kinds(), ids=lambda example: example.kind)
def test_the_bytes_of_tokens_are_those_of_their_text(tokenizer: Tokenizer) -> None:
    sizes = token_bytes(tokenizer)
    assert sizes is not None
    for text in TEXTS[:2]:
        assert sizes[tokenizer.encode(text)].sum() == len(text.encode())
    if tokenizer.end_id is not None:
        assert sizes[tokenizer.end_id] == 0


def test_the_bytes_of_other_tokenizers_are_unknown() -> None:
    pieces = tokenizers.Tokenizer(tokenizers.models.Unigram([("▁a", -1.0), ("b", -2.0)]))
    pieces.decoder = tokenizers.decoders.Metaspace()
    assert token_bytes(BPETokenizer(pieces.to_str())) is None


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_from_bytes_and_bpe(text: str) -> None:
    for tokenizer in (ByteTokenizer(), BPE):
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


BPE = train_bpe(TEXTS, 300)


@pytest.mark.parametrize("tokenizer", all_kinds(), ids=lambda example: example.kind)
def test_a_lone_surrogate_is_no_accident(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\udc80b").size == 3


@pytest.mark.parametrize("tokenizer", all_kinds(), ids=lambda example: example.kind)
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


def test_bpe_is_trained_on_a_line_without_words_as_on_its_parts() -> None:
    """Its time would grow with the square of the line's length."""
    line = "".join(random.Random(0).choices("ACGT", k=1280))
    parts = [line[at : at + 128] for at in range(0, 1280, 128)]
    assert (
        train_bpe([f"so {line} on"], 300).to_json()
        == train_bpe([f"so {parts[0]}", *parts[1:-1], f"{parts[-1]} on"], 300).to_json()
    )
    prefix = line[:1024]  # what may be a word stays one
    assert train_bpe([prefix], 300).to_json() != train_bpe(parts[:8], 300).to_json()
    assert train_bpe([" " * 3000, "=" * 3000], 300).vocab_size > 257


def test_bpe_of_little_text_has_a_small_vocabulary() -> None:
    assert train_bpe(["ab ab"], 4096).vocab_size < 262


@pytest.mark.parametrize("vocab_size", [1, 256])
def test_bpe_needs_room_for_all_bytes(vocab_size: int) -> None:
    with pytest.raises(ConfigError, match=f"at least 257 .*, got {vocab_size}"):
        train_bpe(TEXTS, vocab_size)


@pytest.mark.parametrize("tokenizer", all_kinds(), ids=lambda example: example.kind)
def test_a_saved_tokenizer_loads_as_it_was(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    loaded_tokenizer = load_saved_tokenizer(tmp_path, fingerprint=tokenizer.fingerprint)
    assert loaded_tokenizer.kind == tokenizer.kind
    assert loaded_tokenizer.vocab_size == tokenizer.vocab_size
    assert loaded_tokenizer.end_id == tokenizer.end_id
    assert loaded_tokenizer.encode("self é").tolist() == tokenizer.encode("self é").tolist()


def test_bpe_is_saved_as_the_tokenizers_library_does() -> None:
    assert json.loads(BPE.to_json())["model"]["type"] == "BPE"


def test_another_tokenizer_than_expected_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    with pytest.raises(ConfigError, match="not the tokenizer that made the tokens"):
        load_saved_tokenizer(tmp_path, fingerprint=BPE.fingerprint)


@pytest.mark.parametrize(
    "content",
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
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="not a saved tokenizer"):
        load_saved_tokenizer(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\x80\x04\x95")
    with pytest.raises(ConfigError, match="not a saved tokenizer"):
        load_saved_tokenizer(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: there is no tokenizer here"):
        load_saved_tokenizer(tmp_path)


def test_distinct_tokenizers_have_distinct_fingerprints() -> None:
    all_tokenizers: list[Tokenizer] = [*all_kinds(), train_char(["ab"]), train_bpe(TEXTS, 270)]
    assert len({tokenizer.fingerprint for tokenizer in all_tokenizers}) == len(all_tokenizers)
    assert isinstance(all_tokenizers[2], BPETokenizer)


def foreign(*ends: str) -> tokenizers.Tokenizer:
    """A tokenizer as others save it, with names of their own for the end of a document."""
    model = tokenizers.Tokenizer(
        tokenizers.models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3}, [("a", "b")])
    )
    model.add_special_tokens(list(ends))
    return model


@pytest.mark.parametrize("ends", [["<|endoftext|>"], ["<s>", "</s>"], ["<pad>", END], []])
def test_no_name_of_a_token_is_taken_for_the_end_of_a_document(ends: list[str]) -> None:
    tokenizer = parse_tokenizer(foreign(*ends).to_str())
    assert tokenizer.end_id is None
    assert tokenizer.vocab_size == 4 + len(ends)
    assert tokenizer.encode("abc").tolist() == [3, 2]
    if ends:
        with pytest.raises(ConfigError, match="nothing says which token of the tokenizer ends"):
            separator_of(tokenizer)
    else:  # there is none, and this one has no newline either
        assert separator_of(tokenizer).size == 0
    for end in ends:
        assert not set(tokenizer.encode(f"a{end}b")) & {4, 5}


def test_ids_may_have_gaps() -> None:
    content = json.loads(foreign().to_str())
    content["model"]["vocab"]["ab"] = 9
    tokenizer = parse_tokenizer(json.dumps(content))
    assert tokenizer.encode("ab").tolist() == [9]
    assert tokenizer.vocab_size == 10


def test_a_text_is_encoded_whole_whatever_the_file_says_of_truncation() -> None:
    model = foreign("<pad>")
    model.enable_truncation(2)
    model.enable_padding(pad_id=4, pad_token="<pad>")
    texts = ["abcabc", "a"]
    encodings = parse_tokenizer(model.to_str()).encode_batch(texts)
    assert [ids.tolist() for ids in encodings] == [[3, 2, 3, 2], [0]]


@settings(deadline=None)
@given(text=st.text("ab\n", max_size=40), cuts=st.lists(st.integers(0, 40), max_size=5))
def test_pieces_depend_on_the_text_alone(text: str, cuts: list[int]) -> None:
    given_as = [text[i:j] for i, j in itertools.pairwise([0, *sorted(cuts), len(text)])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE_CHARACTERS", 7)
        pieces = list(in_pieces(given_as))
        assert pieces == list(in_pieces([text]))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= 7 for piece in pieces)
    for piece, following in itertools.pairwise(pieces):
        assert piece.endswith("\n") or "\n" not in (piece + following)[:7]


def test_a_short_document_is_one_piece() -> None:
    assert list(in_pieces(["one\n", "  two\n", "three"])) == ["one\n  two\nthree"]
    assert list(in_pieces([])) == list(in_pieces([""])) == []


def test_a_file_and_its_folder_name_the_same_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(BPE.to_json())
    (tmp_path / "chars.json").write_text(train_char(["ab"]).to_json())
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = named_tokenizer(str(name))
        assert tokenizer is not None
        assert tokenizer.fingerprint == BPE.fingerprint
    chars = named_tokenizer(str(tmp_path / "chars.json"))
    assert chars is not None
    assert chars.kind == "char"


def test_only_what_needs_no_training_is_there_at_once() -> None:
    assert isinstance(named_tokenizer("byte"), ByteTokenizer)
    assert named_tokenizer("char") is named_tokenizer("bpe") is None


def test_a_name_that_names_no_tokenizer_is_told_what_may_be_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer: 'gpt2'; give byte, char, bpe, the path"):
        named_tokenizer("gpt2")
    with pytest.raises(ConfigError, match=r"no tokenizer: the folder .* has no tokenizer\.json"):
        named_tokenizer(str(tmp_path))
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"a\.json: not a saved tokenizer"):
        named_tokenizer(str(tmp_path / "a.json"))
