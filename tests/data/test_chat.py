"""Conversations: what is rendered and masked is what transformers renders and masks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from cases import parametrize_first
from pretrained import TEXT
from transformers import PreTrainedTokenizerFast

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.source import IGNORED
from instar.data.text.dataset import create_dataset_files, lost_conversations, open_data
from instar.data.text.foreign.chat_template import PLAIN
from instar.data.text.tokenizer import load_saved_tokenizer, train_bpe

CHATML = (
    "{% for m in messages %}{{ '<|im|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im|>assistant\n' }}{% endif %}"
)
CONTEXT = 200


def chat(number: int) -> list[dict[str, str]]:
    turns = [("user", f"{number} squared?"), ("assistant", f"{number * number}, of course – ✓")]
    turns += [("user", "cubed?"), ("assistant", f"{number**3}")] * (number % 2)
    turns = [("system", "you know squares"), *turns] if number % 3 == 0 else turns
    return [{"role": role, "content": content} for role, content in turns]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A tokenizer, and 40 conversations."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer.json").write_text(train_bpe([TEXT], 280).to_json())
    lines = (json.dumps({"messages": chat(number)}) for number in range(40))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def config(place: Path, **more: object) -> DataConfig:
    fields = {
        "kind": "chat",
        "source": str(place / "chats.jsonl"),
        "path": str(place / "tokens"),
        "tokenizer": str(place / "model/tokenizer.json"),
        "val_fraction": 0.2,
        "test_fraction": 0.2,
        "packing": False,
        **more,
    }
    return DataConfig.model_validate(fields)


def transformers_tokens(
    place: Path, template: str, messages: list[dict[str, str]]
) -> tuple[list[int], list[int]]:
    """Tokens and mask as transformers' `apply_chat_template` has them."""
    file = str(place / "model/tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<|end|>")
    encoding = tokenizer.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    return encoding["input_ids"], encoding["assistant_masks"]


@pytest.mark.parametrize("packing", [False, True])
def test_tokens_and_targets_are_those_of_transformers(place: Path, packing: bool) -> None:
    data = config(place, packing=packing)
    create_dataset_files(data, 7)
    dataset = open_data(data, 7)
    pairs = {
        tuple(ids): mask
        for ids, mask in (transformers_tokens(place, PLAIN, chat(n)) for n in range(40))
    }
    splits = {name: dataset.held_out(name, CONTEXT) for name in ("val", "test")}
    splits["train"] = dataset.train(CONTEXT, 7)[0]
    targets = 0
    for source in splits.values():
        batch = source.read(np.arange(len(source)))
        assert (batch["targets"] != IGNORED).sum() == source.weights(np.arange(len(source)))
        targets += int(source.weights(np.arange(len(source))))
        if packing:
            continue
        for inputs, row_targets in zip(batch["inputs"], batch["targets"], strict=True):
            matches = [
                ids
                for ids in pairs
                if np.array_equal(inputs[: len(ids) - 1], ids[:-1])
                and not inputs[len(ids) - 1 :].any()
            ]
            assert len(matches) == 1
            ids = np.array(matches[0])
            size = ids.size - 1
            expected = np.where(pairs[matches[0]], ids, IGNORED)[1:]
            assert np.array_equal(row_targets[:size], expected)
            assert (row_targets[size:] == IGNORED).all()
    if not packing:
        assert sum(map(len, splits.values())) == 40
        assert targets == sum(sum(mask) for mask in pairs.values())


def test_a_template_without_generation_marks_what_the_assistant_adds(place: Path) -> None:
    (place / "model/chat_template.jinja").write_text(CHATML)
    data = config(place, tokenizer=str(place / "model"))  # by its folder
    create_dataset_files(data, 7)
    dataset = open_data(data, 7)
    tokenizer = load_saved_tokenizer(place / "model")
    batch = dataset.held_out("val", CONTEXT).read(np.arange(1))
    targets = batch["targets"][0]
    target_text = tokenizer.decode(targets[targets != IGNORED].tolist())
    text = tokenizer.decode(batch["inputs"][0][batch["inputs"][0] > 0].tolist())
    answers = [part.partition("<|end|>")[0] for part in text.split("<|im|>assistant\n")[1:]]
    assert target_text == "".join(f"{answer}<|end|>\n" for answer in answers)


BROKEN = {
    "no messages": (
        '{"text": "hello"}',
        "chats.jsonl:41.*a line of kind chat has a list `messages`",
    ),
    "no JSON": ("{messages", "chats.jsonl:41.*this line is not JSON"),
    "nested too deeply": ('{"messages": ' + "[" * 100_000, "chats.jsonl:41.*this line is not JSON"),
    "no content": ('{"messages": [{"role": "user"}]}', "has a `role` and a `content`, both text"),
    "nothing called": (
        '{"messages": [{"role": "assistant", "content": null}]}',
        "it may be null beside `tool_calls`",
    ),
    "half a weight": (
        '{"messages": [{"role": "assistant", "content": "", "weight": 0.5}]}',
        "`weight` is 0 or 1, of a message of the assistant, not 0.5",
    ),
    "another's weight": (
        '{"messages": [{"role": "user", "content": "", "weight": 1}]}',
        "`weight` is 0 or 1, of a message of the assistant",
    ),
    "the older form": (
        '{"messages": [{"role": "assistant", "content": ""}], "functions": []}',
        "`functions` is of an older form of conversations: say `tools`",
    ),
    "tools that are none": (
        '{"messages": [{"role": "assistant", "content": ""}], "tools": ["add"]}',
        "`tools` is a list of objects",
    ),
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
        create_dataset_files(config(place), 7)
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
            create_dataset_files(config(place, chat_template=str(file)), 7)
        assert not (place / "tokens").exists()


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
WITH_TOOLS = (
    "{% if tools %}<|im|>tools\n{{ tools|tojson }}<|end|>\n{% endif %}{% for m in messages %}<|im|>{{ m.role }}\n"
    "{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}"
    "call {{ c.function.name }} {{ c.function.arguments|tojson }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im|>assistant\n{% endif %}"
)


def train_targets(
    place: Path, template: str, *rows: object, **more: object
) -> tuple[str, list[str]]:
    """The targets' text of the training split of 20 copies of some rows, and what was said."""
    (place / "own.jinja").write_text(template)
    (place / "chats.jsonl").write_text("\n".join([json.dumps(row) for row in rows] * 20))
    messages: list[str] = []
    data = config(place, chat_template=str(place / "own.jinja"), **more)
    create_dataset_files(data, 7, say=messages.append)
    dataset = open_data(data, 7)
    source = dataset.train(CONTEXT, 7)[0]
    tokenizer = load_saved_tokenizer(place / "model")
    batch = source.read(np.arange(len(rows)))
    targets = [row[row != IGNORED].tolist() for row in batch["targets"]]
    return "|".join(map(tokenizer.decode, targets)), messages


def test_tools_are_rendered_as_transformers_renders_them(place: Path) -> None:
    messages = [
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    row = {"messages": messages, "tools": TOOLS}
    targets, _ = train_targets(place, WITH_TOOLS, row, {**row, "tools": json.dumps(TOOLS)})
    assert targets == "|".join(['call add {"a": 1}<|end|>\n'] * 2)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(place / "model/tokenizer.json"))
    expected = tokenizer.apply_chat_template(
        messages, tools=TOOLS, chat_template=WITH_TOOLS, return_dict=True
    )["input_ids"]
    split = open_data(config(place, chat_template=str(place / "own.jinja")), 7).dataset.split("val")
    assert split.read(0, len(expected)).tolist() == expected


def test_tools_that_a_template_leaves_out_are_not_left_out_silently(place: Path) -> None:
    answer = {"role": "assistant", "content": "4"}
    messages = [{"role": "user", "content": "2?"}, answer]
    _, notes = train_targets(place, CHATML, {"messages": messages, "tools": TOOLS})
    assert "note: the chat template leaves out the tools of 20 conversations" in notes
    with pytest.raises(
        ConfigError, match=r"conversation \d+: the chat template leaves out its `tool"
    ):
        train_targets(
            place,
            CHATML,
            {"messages": [messages[0], {**answer, "tool_calls": [CALL]}]},
            path=str(place / "other"),
        )


@parametrize_first("template", [CHATML, PLAIN], first=1)
def test_an_answer_of_weight_0_is_no_target(place: Path, template: str) -> None:
    messages = [
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "BAD", "weight": 0},
        {"role": "user", "content": "really?"},
        {"role": "assistant", "content": "4", "weight": 1},
    ]
    targets, notes = train_targets(place, template, {"messages": messages})
    assert targets.strip() == "4<|end|>"
    assert not [line for line in notes if line.startswith("note")]
    good = {"messages": messages[2:]}
    _, notes = train_targets(
        place, template, {"messages": messages[:2]}, good, good, path=str(place / "other")
    )
    assert "note: 20 of 60 conversations have nothing to learn and are left out" in notes


NEXT_ENDS = {
    "the next role": (
        "{% for m in messages %}<|end|>{{ m.role }}\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|end|>assistant\n{% endif %}"
    ),
    "a separator": (
        "{% for m in messages %}{% if not loop.first %}\n<|end|>\n{% endif %}{{ m.role }}: {{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}\n<|end|>\nassistant: {% endif %}"
    ),
}


@pytest.mark.parametrize("case", NEXT_ENDS)
def test_an_end_that_belongs_to_the_next_message_is_learnt(place: Path, case: str) -> None:
    messages = [
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3?"},
        {"role": "assistant", "content": "9"},
    ]
    targets, notes = train_targets(place, NEXT_ENDS[case], {"messages": messages})
    assert targets.replace("\n", "").replace(" ", "") == "4<|end|>9<|end|>"
    assert not [line for line in notes if line.startswith("note")]


UNLEARNT = {
    "nothing": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "note: nothing ends an answer in the chat template: the model will not learn to end one",
    ),
    "outside of the marks": (
        PLAIN.replace(
            " + eos_token -}}{%- endgeneration -%}", " -}}{%- endgeneration -%}{{- eos_token -}}"
        ),
        "note: the chat template leaves <|end|> out of its {% generation %}: the model will not learn to end "
        "an answer",
    ),
}


@pytest.mark.parametrize("case", UNLEARNT)
def test_a_template_that_does_not_teach_the_end_of_an_answer_is_named(
    place: Path, case: str
) -> None:
    template, note = UNLEARNT[case]
    _, notes = train_targets(place, template, *({"messages": chat(n)} for n in range(3)))
    assert note in notes


def test_a_template_may_refuse_other_conversations(place: Path) -> None:
    """Such as those without a system message."""
    strict = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    messages = [{"role": "system", "content": "s"}, *chat(1)[:2]]
    for number, template in enumerate((strict + CHATML, strict + PLAIN)):
        targets, notes = train_targets(
            place, template, {"messages": messages}, path=str(place / f"{number}")
        )
        assert targets.strip() == "1, of course – ✓<|end|>"
        assert not [line for line in notes if line.startswith("note")]


def test_conversations_that_a_context_leaves_out_are_counted(place: Path) -> None:
    long = {"messages": [*chat(1)[:1], {"role": "assistant", "content": "4 " * 40}]}
    late = {"messages": [{"role": "user", "content": "so " * 40}, *chat(1)[1:2]]}
    (place / "chats.jsonl").write_text("\n".join(map(json.dumps, [long, late] * 20)))
    data = config(place)
    create_dataset_files(data, 7)
    long_targets = sum(transformers_tokens(place, PLAIN, long["messages"])[1])
    for remark in lost_conversations(data, 7, 40):
        counts = [int(n.replace(",", "")) for n in re.findall(r"\b\d[\d,]*", remark)]
        left_out_count, every, context, cut, lost_targets, targets = counts
        assert (left_out_count + cut, context) == (every, 40)
        short = sum(transformers_tokens(place, PLAIN, long["messages"])[1][:41])
        assert lost_targets == targets - cut * short
        assert targets == cut * long_targets + left_out_count * sum(
            transformers_tokens(place, PLAIN, late["messages"])[1]
        )
    assert len(lost_conversations(data, 7, 40)) == 3
    assert lost_conversations(data, 7, CONTEXT) == []
    assert lost_conversations(data.model_copy(update={"packing": True}), 7, 40) == []


def test_answers_that_are_rendered_otherwise_later_are_trained_one_by_one(place: Path) -> None:
    """The thoughts of an earlier answer are left out of what follows it, as when it was generated."""
    template = CHATML.replace(
        "m['content'] +",
        "('(hm) ' if loop.last and m.role == 'assistant' else '') + m['content'] +",
    )
    targets, notes = train_targets(place, template, {"messages": chat(1)}, {"messages": chat(2)})
    expected = {
        "(hm) 1, of course – ✓<|end|>\n",
        "(hm) 1<|end|>\n",
        "(hm) 4, of course – ✓<|end|>\n",
    }
    assert (
        set(targets.split("|>\n|")) <= {text.removesuffix("|>\n") for text in expected} | expected
    )
    (note,) = [line for line in notes if line.startswith("note")]
    assert note.startswith("note: 20 conversations became 40, one for each answer")


def test_conversations_that_leak_between_splits_are_counted_and_one_key_removes_them(
    place: Path,
) -> None:
    rows = [{"messages": chat(number % 20), "id": number} for number in range(80)]
    (place / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    messages: list[str] = []
    create_dataset_files(config(place), 7, say=messages.append)
    (leaks,) = [text for text in messages if "of val are trained on too, word for word" in text]
    assert "conversations" in leaks
    messages = []
    unique_data = config(place, path=str(place / "once"), drop_duplicates=True)
    create_dataset_files(unique_data, 7, say=messages.append)
    assert "left out 60 of 80 conversations, which are there before" in messages
    assert not any("trained on too" in text for text in messages)
    dataset = open_data(unique_data, 7).dataset
    texts = [
        load_saved_tokenizer(place / "model").decode(
            dataset.split(name).read(0, len(dataset.split(name))).tolist()
        )
        for name in ("train", "val", "test")
    ]
    assert "".join(texts).count("squared?") == 20


def test_conversations_of_val_source_are_not_trained_on(place: Path) -> None:
    (place / "held.jsonl").write_text(
        "".join(json.dumps({"messages": chat(n)}) + "\n" for n in range(30, 60))
    )
    val_fields = {"val_source": str(place / "held.jsonl"), "test_fraction": 0.0}
    messages: list[str] = []
    create_dataset_files(config(place, **val_fields), 7, say=messages.append)
    assert any("10 of 30 conversations of val are trained on too" in text for text in messages)
    messages = []
    create_dataset_files(
        config(place, **val_fields, path=str(place / "once"), drop_duplicates=True),
        7,
        say=messages.append,
    )
    assert "left out 10 of 40 conversations, which are there before or held out" in messages


def test_files_that_are_not_read_beside_those_that_are_are_refused(place: Path) -> None:
    folder = place / "folder"
    folder.mkdir()
    (folder / "one.jsonl").write_bytes((place / "chats.jsonl").read_bytes())
    for name in ("README.md", "notes.txt"):
        (folder / name).write_text("About these conversations.")
    of_folder = config(place, source=str(folder))
    create_dataset_files(of_folder, 1)
    (folder / "two.parquet").touch()
    (folder / "three.json").write_text(json.dumps([{"messages": chat(1)}]))
    data = config(place, source=str(folder), path=str(place / "other"))
    with pytest.raises(
        ConfigError, match=r"does not read with these: three.json, two.parquet"
    ) as e:
        create_dataset_files(data, 1)
    assert "by a glob, such as" in e.value.problems[0].hint
    data = config(place, source=str(folder / "*.jsonl"), path=str(place / "other"))
    create_dataset_files(data, 1)
