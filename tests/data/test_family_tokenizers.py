"""Tokenizers and chat templates of the families: ids, masks and texts are those of transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from cases import parametrize_first
from tokenizer_layouts import LAYOUTS, marked_template, write_tokenizer
from transformers import AutoTokenizer

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.text.chat import TARGET, encode_renderings
from instar.data.text.dataset import create_dataset_files, open_data
from instar.data.text.foreign.chat_template import template_beside
from instar.data.text.streams.items import open_items
from instar.data.text.streams.samples import DocumentStream, TokenLanes
from instar.data.text.tokenizer import (
    BPETokenizer,
    load_saved_tokenizer,
    prompt_tokens,
    separator_of,
    tokenizer_files,
)

TEXTS = ["the words", "  def f(x):\n\n\treturn  x ", "naïve 再见 ✓ é\u0301", "\n", " ", "🦋"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("layouts")
    for kind in LAYOUTS:
        write_tokenizer(kind, place / kind)
    return place


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_text_becomes_the_tokens_of_transformers(folders: Path, kind: str) -> None:
    reference: Any = AutoTokenizer.from_pretrained(folders / kind)
    tokenizer = load_saved_tokenizer(folders / kind)
    for text in TEXTS:
        ids = reference(text)["input_ids"]
        assert tokenizer.encode(text).tolist() == ids
        assert prompt_tokens(tokenizer, text).tolist() == ids
        assert tokenizer.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)
    assert tokenizer.before.size == LAYOUTS[kind].adds_bos
    assert (tokenizer.end_token, tokenizer.end_id) == (reference.eos_token, reference.eos_token_id)
    assert separator_of(tokenizer).tolist() == [reference.eos_token_id]


@pytest.mark.parametrize("kind", ["gemma2", "phi3", "llama"])
def test_documents_have_what_surrounds_a_text_on_every_road(
    folders: Path, tmp_path: Path, kind: str
) -> None:
    reference: Any = AutoTokenizer.from_pretrained(folders / kind)
    texts = [f"document {n} of the many" for n in range(40)]
    source = tmp_path / "docs.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    folder = str(folders / kind)
    data = DataConfig(source=str(source), tokenizer=folder, path=str(tmp_path / "tokens"))
    messages: list[str] = []
    create_dataset_files(data, 7, say=messages.append)
    layout = LAYOUTS[kind]
    around = [layout.bos, "…", layout.eos] if layout.adds_bos else ["…", layout.eos]
    assert messages[-1].endswith(f"; documents {' '.join(filter(None, around))}")
    documents = [[*reference(text)["input_ids"], reference.eos_token_id] for text in texts]
    split = open_data(data, 7).dataset.split("train")
    ids = split.read(0, len(split)).tolist()
    matches = [document for document in documents if _within(document, ids)]
    assert len(matches) > 30
    assert ids[: len(documents[0])] in documents
    assert abs(sum(map(len, matches)) - len(ids)) < 2 * len(documents[0])  # one is cut

    tokenizer = load_saved_tokenizer(tmp_path / "tokens")
    assert tokenizer.encode("a").tolist() == reference("a")["input_ids"]
    stream_config = data.model_copy(update={"kind": "stream"})
    stream = DocumentStream(TokenLanes(open_items(stream_config), tokenizer, ids=False), 64)
    assert [sample.tolist() for sample in stream.open(0)] == documents


def _within(part: list[int], tokens: list[int]) -> bool:
    return any(tokens[at : at + len(part)] == part for at in range(len(tokens)))


def test_data_of_another_end_or_beginning_are_not_reused(tmp_path: Path) -> None:
    tokenizer = write_tokenizer("gemma2", tmp_path / "model")
    (tmp_path / "a.txt").write_text("the words of the many\n" * 200)
    fields = {"source": str(tmp_path / "a.txt"), "tokenizer": str(tmp_path / "model")}
    data = DataConfig.model_validate(fields | {"path": str(tmp_path / "tokens")})
    create_dataset_files(data, 7)
    create_dataset_files(data, 7)
    file = tmp_path / "model/tokenizer_config.json"
    text = file.read_text()
    file.write_text(text.replace('"<eos>"', '"<end_of_turn>"'))
    with pytest.raises(ConfigError, match="is not the tokenizer that made the data set"):
        create_dataset_files(data, 7)
    file.write_text(text)
    tokenizer.post_processor = None
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    with pytest.raises(ConfigError, match="is not the tokenizer that made the data set"):
        create_dataset_files(data, 7)


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
    assert load_saved_tokenizer(tmp_path).end_token == end


def test_an_end_that_only_the_model_says_is_kept_with_the_data(
    folders: Path, tmp_path: Path
) -> None:
    """Beside a tokenizer's config that says none, which a run keeps."""
    (tmp_path / "tokenizer.json").write_bytes((folders / "gemma2/tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    tokenizer = load_saved_tokenizer(tmp_path)
    (tmp_path / "config.json").unlink()
    for name, content in tokenizer_files(tokenizer).items():
        (tmp_path / name).write_bytes(content)
    kept_tokenizer = load_saved_tokenizer(tmp_path, fingerprint=tokenizer.fingerprint)
    assert kept_tokenizer.end_token == "<eos>"


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
    tokenizer = load_saved_tokenizer(tmp_path)
    assert isinstance(tokenizer, BPETokenizer)
    assert tokenizer.end_token is None
    with pytest.raises(
        ConfigError, match=f"ends a document: {reason}; name it in tokenizer_config"
    ):
        separator_of(tokenizer)


def test_a_tokenizer_that_ends_texts_itself_needs_no_other_end(
    folders: Path, tmp_path: Path
) -> None:
    content = json.loads((folders / "gemma2/tokenizer.json").read_text())
    around = content["post_processor"]
    around["single"].append({"SpecialToken": {"id": "<eos>", "type_id": 0}})
    around["special_tokens"]["<eos>"] = {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    tokenizer = load_saved_tokenizer(tmp_path)
    reference: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("words").tolist() == reference("words")["input_ids"]
    assert tokenizer.encode("words")[-1] == 1 != prompt_tokens(tokenizer, "words")[-1]
    assert separator_of(tokenizer).size == 0


def test_what_else_a_post_processor_does_is_refused(folders: Path, tmp_path: Path) -> None:
    content = json.loads((folders / "gemma2/tokenizer.json").read_text())
    content["post_processor"]["single"].append({"Sequence": {"id": "A", "type_id": 1}})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="does not surround a text with tokens"):
        load_saved_tokenizer(tmp_path)


def conversation(chance: random.Random, *, system: bool) -> list[dict[str, str]]:
    """With whitespace, unicode, code and empty contents."""
    contents = [
        "",
        " ",
        "Why?",
        "  two\n\nlines ",
        "def f(x):\n    return   x\n",
        "naïve 再见 ✓",
        "🦋 é\u0301",
    ]
    messages = [{"role": "system", "content": chance.choice(contents)}] * system
    for _ in range(chance.randint(1, 3)):
        for role in ("user", "assistant"):
            content = "".join(chance.choices(contents, k=chance.randint(1, 2)))
            messages.append({"role": role, "content": content})
    return messages


def conversations(kind: str, count: int = 25) -> list[list[dict[str, str]]]:
    chance = random.Random(kind)
    system = kind not in ("gemma2",)  # whose template refuses it
    return [conversation(chance, system=system and n % 2 == 0) for n in range(count)]


@parametrize_first("kind", LAYOUTS, first=2)
def test_marked_conversations_have_the_tokens_and_masks_of_transformers(
    folders: Path, tmp_path: Path, kind: str
) -> None:
    reference: Any = AutoTokenizer.from_pretrained(folders / kind)
    # where a post-processor trims offsets, transformers loses what begins or ends with whitespace
    reference.backend_tokenizer.post_processor = None
    (tmp_path / "marked.jinja").write_text(template_text := marked_template(kind))
    tokenizer = load_saved_tokenizer(folders / kind)
    assert isinstance(tokenizer, BPETokenizer)
    template = template_beside(folders / kind, tokenizer, tmp_path / "marked.jinja")
    for messages in conversations(kind):
        (rendering,) = template.renderings(messages)
        ((ids, marks),) = encode_renderings(iter([rendering]), tokenizer)
        expected = reference.apply_chat_template(
            messages,
            chat_template=template_text,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert ids.tolist() == expected["input_ids"]
        assert ((marks & TARGET) > 0).tolist() == list(map(bool, expected["assistant_masks"]))


@parametrize_first("kind", LAYOUTS, first=2)
def test_an_answer_is_trained_as_it_is_generated(folders: Path, kind: str) -> None:
    """By the model's own template: after the prompt that transformers gives, and as it renders the answer."""
    reference: Any = AutoTokenizer.from_pretrained(folders / kind)
    tokenizer = load_saved_tokenizer(folders / kind)
    template = template_beside(folders / kind, tokenizer)
    num_split = 0
    for messages in conversations(kind):
        renderings = template.renderings(messages)
        num_split += len(renderings) > 1
        answers = [
            number for number, message in enumerate(messages) if message["role"] == "assistant"
        ]
        spans = [(rendering.text, *span) for rendering in renderings for span in rendering.spans]
        assert len(spans) == len(answers)
        for number, (text, begin, end) in zip(answers, spans, strict=True):
            prompt = reference.apply_chat_template(
                messages[:number], tokenize=False, add_generation_prompt=True
            )
            through = reference.apply_chat_template(messages[: number + 1], tokenize=False)
            assert text[:begin] == prompt
            assert through.startswith(text[:end])
            assert template.end.token in text[begin:end]
        if len(renderings) == 1:
            assert renderings[0].text == reference.apply_chat_template(messages, tokenize=False)
    assert (num_split > 0) == (LAYOUTS[kind].template == "qwen3")


@pytest.mark.parametrize(("kind", "end"), [("phi3", "<|end|>"), ("qwen3", "<|im_end|>")])
def test_a_sampled_answer_ends_with_the_token_that_ends_one(
    folders: Path, kind: str, end: str
) -> None:
    reference: Any = AutoTokenizer.from_pretrained(folders / kind)
    prompt = reference.apply_chat_template(
        [{"role": "user", "content": "so?"}], tokenize=False, add_generation_prompt=True
    )
    tokenizer = load_saved_tokenizer(folders / kind)
    assert template_beside(folders / kind, tokenizer).around_answer("so?") == (prompt, end)


SAYS = {
    "adds a beginning": ({"add_bos_token": True}, False),
    "adds none": ({"add_bos_token": False}, True),
    "adds an end": ({"add_bos_token": True, "add_eos_token": True}, True),
    "adds an end only": ({"add_eos_token": True}, False),
    "null": ({"add_bos_token": None}, True),
}


@pytest.mark.parametrize("case", SAYS)
@pytest.mark.parametrize(
    "name", ["LlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizerFast", None]
)
def test_what_a_config_says_is_added_counts_as_in_transformers(
    folders: Path, tmp_path: Path, name: str | None, case: str
) -> None:
    """Which reads it from the file of the tokenizer alone, if there is one."""
    changes, has_beginning = SAYS[case]
    family = "llama2" if name == "LlamaTokenizer" else "gemma2"
    content = json.loads((folders / family / "tokenizer.json").read_text())
    if not has_beginning:
        content["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((folders / family / "tokenizer_config.json").read_text())
    config = {key: value for key, value in config.items() if key != "add_bos_token"} | changes
    config["tokenizer_class"] = name
    if name is None:
        del config["tokenizer_class"]
        (tmp_path / "config.json").write_bytes((folders / family / "config.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert (
        load_saved_tokenizer(tmp_path).encode("words").tolist() == reference("words")["input_ids"]
    )
