"""Tokenizers of the families: what is around a text, and the end of a document, are what transformers says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_layouts import LAYOUTS, write_tokenizer
from transformers import AutoTokenizer

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.text.dataset import open_data, prepare_data
from instar.data.text.streams.items import open_items
from instar.data.text.streams.samples import DocumentStream, TokenLanes
from instar.data.text.tokenizer import BPETokenizer, load_tokenizer, prompt_tokens, separator_of

TEXTS = ["the words", "  def f(x):\n\n\treturn  x ", "naïve 再见 ✓ é\u0301", "\n", " ", "🦋"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("layouts")
    for kind in LAYOUTS:
        write_tokenizer(kind, place / kind)
    return place


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_text_becomes_the_tokens_of_transformers(folders: Path, kind: str) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(folders / kind)
    ours = load_tokenizer(folders / kind)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text).tolist() == ids
        assert prompt_tokens(ours, text).tolist() == ids
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert ours.before.size == LAYOUTS[kind].adds_bos
    assert (ours.end_token, ours.end_id) == (theirs.eos_token, theirs.eos_token_id)
    assert separator_of(ours).tolist() == [theirs.eos_token_id]


@pytest.mark.parametrize("kind", ["gemma2", "phi3", "llama"])
def test_documents_have_what_surrounds_a_text_on_every_road(
    folders: Path, tmp_path: Path, kind: str
) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(folders / kind)
    texts = [f"document {n} of the many" for n in range(40)]
    source = tmp_path / "docs.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    folder = str(folders / kind)
    data = DataConfig(source=str(source), tokenizer=folder, path=str(tmp_path / "tokens"))
    told: list[str] = []
    prepare_data(data, 7, say=told.append)
    layout = LAYOUTS[kind]
    around = [layout.bos, "…", layout.eos] if layout.adds_bos else ["…", layout.eos]
    assert told[-1].endswith(f"; documents {' '.join(filter(None, around))}")
    documents = [[*theirs(text)["input_ids"], theirs.eos_token_id] for text in texts]
    split = open_data(data, 7).dataset.split("train")
    prepared = split.read(0, len(split)).tolist()
    chosen = [document for document in documents if _within(document, prepared)]
    assert len(chosen) > 30
    assert prepared[: len(documents[0])] in documents
    assert abs(sum(map(len, chosen)) - len(prepared)) < 2 * len(documents[0])  # one is cut

    kept = load_tokenizer(tmp_path / "tokens")
    assert kept.encode("a").tolist() == theirs("a")["input_ids"]
    streamed = data.model_copy(update={"kind": "stream"})
    stream = DocumentStream(TokenLanes(open_items(streamed), kept, ids=False), 64)
    assert [sample.tolist() for sample in stream.open(0)] == documents


def _within(part: list[int], tokens: list[int]) -> bool:
    return any(tokens[at : at + len(part)] == part for at in range(len(tokens)))


def test_data_of_another_end_or_beginning_are_not_reused(tmp_path: Path) -> None:
    tokenizer = write_tokenizer("gemma2", tmp_path / "model")
    (tmp_path / "a.txt").write_text("the words of the many\n" * 200)
    given = {"source": str(tmp_path / "a.txt"), "tokenizer": str(tmp_path / "model")}
    data = DataConfig.model_validate(given | {"path": str(tmp_path / "tokens")})
    prepare_data(data, 7)
    prepare_data(data, 7)
    file = tmp_path / "model/tokenizer_config.json"
    said = file.read_text()
    file.write_text(said.replace('"<eos>"', '"<end_of_turn>"'))
    with pytest.raises(ConfigError, match="is not the tokenizer that made the data set"):
        prepare_data(data, 7)
    file.write_text(said)
    tokenizer.post_processor = None
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    with pytest.raises(ConfigError, match="is not the tokenizer that made the data set"):
        prepare_data(data, 7)


SAID = {
    "tokenizer_config": ({"tokenizer_config.json": {"eos_token": "<eos>"}}, "<eos>"),
    "its own form": ({"tokenizer_config.json": {"eos_token": {"content": "<eos>"}}}, "<eos>"),
    "special_tokens_map": ({"special_tokens_map.json": {"eos_token": "<eos>"}}, "<eos>"),
    "generation_config": ({"generation_config.json": {"eos_token_id": [1, 5]}}, "<eos>"),
    "config": ({"config.json": {"eos_token_id": 1}}, "<eos>"),
    "the tokenizer's file first": (
        {
            "tokenizer_config.json": {"eos_token": "<end_of_turn>"},
            "config.json": {"eos_token_id": 1},
        },
        "<end_of_turn>",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_the_end_of_a_document_is_what_a_file_says(
    folders: Path, tmp_path: Path, case: str
) -> None:
    files, end = SAID[case]
    (tmp_path / "tokenizer.json").write_bytes((folders / "gemma2/tokenizer.json").read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).end_token == end


UNSAID = {
    "nothing": ({}, "no eos_token is named beside it"),
    "not a token": (
        {"tokenizer_config.json": {"eos_token": "<none>"}},
        "the eos_token '<none>' beside it is not in its vocabulary",
    ),
    "a default": (
        {"config.json": {"eos_token_id": 400}},
        "eos_token_id 400 of config.json is not among its added tokens",
    ),
}


@pytest.mark.parametrize("case", UNSAID)
def test_where_nothing_says_the_end_it_is_not_guessed(
    folders: Path, tmp_path: Path, case: str
) -> None:
    files, reason = UNSAID[case]
    (tmp_path / "tokenizer.json").write_bytes((folders / "gemma2/tokenizer.json").read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, BPETokenizer)
    assert tokenizer.end_token is None
    with pytest.raises(
        ConfigError, match=f"ends a document: {reason}; name it in tokenizer_config"
    ):
        separator_of(tokenizer)


def test_a_tokenizer_that_ends_texts_itself_needs_no_other_end(
    folders: Path, tmp_path: Path
) -> None:
    saved = json.loads((folders / "gemma2/tokenizer.json").read_text())
    around = saved["post_processor"]
    around["single"].append({"SpecialToken": {"id": "<eos>", "type_id": 0}})
    around["special_tokens"]["<eos>"] = {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    tokenizer = load_tokenizer(tmp_path)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("words").tolist() == theirs("words")["input_ids"]
    assert tokenizer.encode("words")[-1] == 1 != prompt_tokens(tokenizer, "words")[-1]
    assert separator_of(tokenizer).size == 0


def test_what_else_a_post_processor_does_is_refused(folders: Path, tmp_path: Path) -> None:
    saved = json.loads((folders / "gemma2/tokenizer.json").read_text())
    saved["post_processor"]["single"].append({"Sequence": {"id": "A", "type_id": 1}})
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match="does not surround a text with tokens"):
        load_tokenizer(tmp_path)
