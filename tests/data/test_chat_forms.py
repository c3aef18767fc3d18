"""Forms of conversations other than lists of `messages`: ShareGPT's, Alpaca's, and TRL's prompt and completion."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pretrained import TEXT

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.config.load import load_config
from instar.data.text.chat_forms import conversation_of
from instar.data.text.dataset import create_dataset_files, open_data
from instar.data.text.tokenizer import load_saved_tokenizer, train_bpe

Row = dict[str, Any]


def messages(number: int, *, system: bool = True) -> list[Row]:
    turns = [("system", "you know squares")] * system
    turns += [("user", f"{number} squared?"), ("assistant", f"{number * number}, of course – ✓")]
    turns += [("user", "cubed?"), ("assistant", f"{number**3}")]
    return [{"role": role, "content": content} for role, content in turns]


def of_sharegpt(number: int) -> Row:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in messages(number)]
    if number % 2:
        return {"system": turns[0]["value"], "conversations": turns[1:]}
    return {"conversations": turns}


def of_alpaca(number: int) -> Row:
    system, question, answer, instruction, output = (m["content"] for m in messages(number))
    history = [[question, answer]]
    return {"system": system, "history": history, "instruction": instruction, "output": output}


FORMS: dict[str, Callable[[int], Row]] = {"sharegpt": of_sharegpt, "alpaca": of_alpaca}


def prepare_samples(place: Path, rows: list[Row], **keys: object) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of all samples of training."""
    place.mkdir()
    (place / "model").mkdir()
    (place / "model/tokenizer.json").write_text(train_bpe([TEXT], 280).to_json())
    (place / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    data = DataConfig(
        kind="chat",
        source=str(place / "chats.jsonl"),
        path=str(place / "tokens"),
        tokenizer=str(place / "model/tokenizer.json"),
        packing=False,
        **keys,  # type: ignore[arg-type]
    )
    create_dataset_files(data, 7)
    samples, _ = open_data(data, 7).train(200, 7)
    batch = samples.read(np.arange(len(samples)))
    return batch["inputs"], batch["targets"]


@pytest.mark.parametrize("form", FORMS)
def test_conversations_of_any_form_become_the_same_samples(tmp_path: Path, form: str) -> None:
    numbers = range(40)
    expected = prepare_samples(tmp_path / "messages", [{"messages": messages(n)} for n in numbers])
    rows = [FORMS[form](n) for n in numbers]
    inputs, targets = prepare_samples(tmp_path / form, rows, chat_form=form)
    # which conversations are held out depends on the lengths of the lines
    texts = [{tuple(row) for row in arrays[0].tolist()} for arrays in (expected, (inputs, targets))]
    assert len(texts[0] & texts[1]) > 25
    of_text = {tuple(i): t for i, t in zip(expected[0].tolist(), expected[1].tolist(), strict=True)}
    for sample, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert of_text.get(tuple(sample), target) == target


def test_null_is_no_key_of_an_older_form() -> None:
    null_fields = {"function_call": None, "tool_calls": None}
    row = {"messages": [{**message, **null_fields} for message in messages(1)], "functions": None}
    conversation_of(row, "messages", last_answer_only=False)


@pytest.mark.parametrize("key", ["tools", "documents"])
def test_an_empty_text_of_options_is_none(key: str) -> None:
    row = {"messages": messages(1)}
    plain = conversation_of(row, "messages", last_answer_only=False)
    assert conversation_of(row | {key: ""}, "messages", last_answer_only=False) == plain
    assert conversation_of(row | {key: []}, "messages", last_answer_only=False) != plain
    with pytest.raises(ValueError, match=f"`{key}` is a list of objects"):
        conversation_of(row | {key: " "}, "messages", last_answer_only=False)


def test_only_a_completion_is_trained(tmp_path: Path) -> None:
    rows = [{"prompt": messages(n)[:-1], "completion": messages(n)[-1:]} for n in range(40)]
    _, targets = prepare_samples(tmp_path / "rows", rows, chat_form="prompt_completion")
    tokenizer = load_saved_tokenizer(tmp_path / "rows/model")
    answers = {tokenizer.decode(row[row >= 0].tolist()) for row in targets}
    assert answers <= {f"{n**3}<|end|>" for n in range(40)}
    assert len(answers) > 25


def test_only_the_last_answer_is_trained_where_the_config_says_so(tmp_path: Path) -> None:
    rows = [{"messages": messages(n)} for n in range(40)]
    every, last = (
        prepare_samples(tmp_path / answers, rows, chat_answers=answers)[1]
        for answers in ("all", "last")
    )
    tokenizer = load_saved_tokenizer(tmp_path / "all/model")
    assert {tokenizer.decode(row[row >= 0].tolist()) for row in last} <= {
        f"{n**3}<|end|>" for n in range(40)
    }
    assert ((every >= 0).sum(axis=1) > (last >= 0).sum(axis=1)).all()


def test_what_was_prepared_in_another_form_is_not_reused(tmp_path: Path) -> None:
    rows = [{"messages": messages(n)} for n in range(40)]
    prepare_samples(tmp_path / "rows", rows, chat_answers="last")
    data = DataConfig(
        kind="chat",
        source=str(tmp_path / "rows/chats.jsonl"),
        path=str(tmp_path / "rows/tokens"),
        tokenizer=str(tmp_path / "rows/model/tokenizer.json"),
        packing=False,
    )
    with pytest.raises(ConfigError, match="chat_answers='last', not 'all'"):
        create_dataset_files(data, 7)


REFUSED = {
    "sharegpt as messages": (
        "messages",
        of_sharegpt(1),
        "has a list `messages`; these rows look like data.chat_form: sharegpt",
    ),
    "alpaca as messages": ("messages", of_alpaca(1), "look like data.chat_form: alpaca"),
    "messages as alpaca": (
        "alpaca",
        {"messages": messages(1)},
        "has `instruction` and `output`, both text; these rows look like data.chat_form: messages",
    ),
    "an unknown speaker": (
        "sharegpt",
        {"conversations": [{"from": "function_call", "value": "{}"}]},
        "`from` is 'function_call', which is none of human",
    ),
    "a value that is no text": (
        "sharegpt",
        {"conversations": [{"from": "gpt", "value": 3}]},
        "has a `role` and a `content`, both text",
    ),
    "a history of single texts": (
        "alpaca",
        {"instruction": "a", "output": "b", "history": ["c"]},
        "`history` a list of pairs of texts",
    ),
    "prompt and completion as text": (
        "prompt_completion",
        {"prompt": "a", "completion": "b"},
        "are text that no chat template surrounds",
    ),
    "a prompt alone": ("prompt_completion", {"prompt": messages(1)}, "has two lists"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_of_another_form_are_refused_with_its_name(case: str) -> None:
    form, row, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        conversation_of(row, form, last_answer_only=False)


def test_alpacas_input_follows_the_instruction() -> None:
    row = {"instruction": "Square it.", "input": "3", "output": "9"}
    conversation = conversation_of(row, "alpaca", last_answer_only=False)
    assert conversation.messages == [
        {"role": "user", "content": "Square it.\n3"},
        {"role": "assistant", "content": "9"},
    ]


@pytest.mark.parametrize("key", ["data.chat_form=alpaca", "data.chat_answers=last"])
def test_keys_of_conversations_are_refused_for_other_kinds(key: str) -> None:
    with pytest.raises(ConfigError, match="is of conversations, and kind tokens has none"):
        load_config(None, (key,))
