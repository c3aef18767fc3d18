"""Conversations: what is rendered and masked is what transformers renders and masks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pretrained import TEXT
from transformers import PreTrainedTokenizerFast

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.source import IGNORED
from instar.data.text.chat import PLAIN
from instar.data.text.dataset import open_data, prepare_data
from instar.data.text.tokenizer import load_tokenizer, train_bpe

CHATML = (
    "{% for m in messages %}{{ '<|im|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im|>assistant\n' }}{% endif %}"
)
CONTEXT = 200


def chat(number: int) -> list[dict[str, str]]:
    said = [("user", f"{number} squared?"), ("assistant", f"{number * number}, of course – ✓")]
    said += [("user", "cubed?"), ("assistant", f"{number**3}")] * (number % 2)
    said = [("system", "you know squares"), *said] if number % 3 == 0 else said
    return [{"role": role, "content": content} for role, content in said]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A tokenizer, and 40 conversations."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer.json").write_text(train_bpe([TEXT], 280).to_json())
    lines = (json.dumps({"messages": chat(number)}) for number in range(40))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def config(place: Path, **more: object) -> DataConfig:
    given = {
        "kind": "chat",
        "source": str(place / "chats.jsonl"),
        "path": str(place / "tokens"),
        "tokenizer": str(place / "model/tokenizer.json"),
        "val_fraction": 0.2,
        "test_fraction": 0.2,
        "packing": False,
        **more,
    }
    return DataConfig.model_validate(given)


def theirs(
    place: Path, template: str, messages: list[dict[str, str]]
) -> tuple[list[int], list[int]]:
    """Tokens and mask as transformers' `apply_chat_template` has them."""
    file = str(place / "model/tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<|end|>")
    found = tokenizer.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    return found["input_ids"], found["assistant_masks"]


@pytest.mark.parametrize("packing", [False, True])
def test_tokens_and_targets_are_those_of_transformers(place: Path, packing: bool) -> None:
    data = config(place, packing=packing)
    prepare_data(data, 7)
    opened = open_data(data, 7)
    pairs = {tuple(ids): mask for ids, mask in (theirs(place, PLAIN, chat(n)) for n in range(40))}
    splits = {name: opened.held_out(name, CONTEXT) for name in ("val", "test")}
    splits["train"] = opened.train(CONTEXT, 7)[0]
    targets = 0
    for source in splits.values():
        batch = source.read(np.arange(len(source)))
        assert (batch["targets"] != IGNORED).sum() == source.weights(np.arange(len(source)))
        targets += int(source.weights(np.arange(len(source))))
        if packing:
            continue
        for inputs, wanted in zip(batch["inputs"], batch["targets"], strict=True):
            found = [
                ids
                for ids in pairs
                if np.array_equal(inputs[: len(ids) - 1], ids[:-1])
                and not inputs[len(ids) - 1 :].any()
            ]
            assert len(found) == 1
            ids = np.array(found[0])
            size = ids.size - 1
            expected = np.where(pairs[found[0]], ids, IGNORED)[1:]
            assert np.array_equal(wanted[:size], expected)
            assert (wanted[size:] == IGNORED).all()
    if not packing:
        assert sum(map(len, splits.values())) == 40
        assert targets == sum(sum(mask) for mask in pairs.values())


def test_a_template_without_generation_marks_what_the_assistant_adds(place: Path) -> None:
    (place / "model/chat_template.jinja").write_text(CHATML)
    named = config(place, tokenizer=str(place / "model"))  # by its folder
    prepare_data(named, 7)
    opened = open_data(named, 7)
    tokenizer = load_tokenizer(place / "model")
    batch = opened.held_out("val", CONTEXT).read(np.arange(1))
    wanted = batch["targets"][0]
    said = tokenizer.decode(wanted[wanted != IGNORED].tolist())
    text = tokenizer.decode(batch["inputs"][0][batch["inputs"][0] > 0].tolist())
    answers = [part.partition("<|end|>")[0] for part in text.split("<|im|>assistant\n")[1:]]
    assert said == "".join(f"{answer}<|end|>\n" for answer in answers)


BROKEN = {
    "no messages": (
        '{"text": "hello"}',
        "chats.jsonl:41.*a line of kind chat has a list `messages`",
    ),
    "no JSON": ("{messages", "chats.jsonl:41.*has a list `messages`"),
    "no content": ('{"messages": [{"role": "user"}]}', "has a `role` and a `content`, both text"),
    "no answer": (
        '{"messages": [{"role": "user", "content": "so?"}]}',
        "none of `messages` is the assistant's",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_line_that_is_no_conversation_is_refused(place: Path, case: str) -> None:
    line, message = BROKEN[case]
    with (place / "chats.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=message):
        prepare_data(config(place), 7)
    assert not (place / "tokens").exists()


def test_a_template_that_cannot_be_masked_or_escapes_is_refused(place: Path) -> None:
    file = place / "own.jinja"
    for template, message in (
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "told apart"),
        ("{{ messages.__class__.__mro__ }}", "the chat template refuses it"),
        ("{{ raise_exception('no system') }}", "the chat template refuses it: no system"),
    ):
        file.write_text(template)
        with pytest.raises(ConfigError, match=message):
            prepare_data(config(place, chat_template=str(file)), 7)
        assert not (place / "tokens").exists()
