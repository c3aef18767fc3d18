"""Conversations in the forms that the field has, as the messages that a chat template is given.

| form | a row |
| --- | --- |
| `messages` | `{"messages": [{"role": "user", "content": "…"}, …]}`, as in OpenAI's API and TRL |
| `sharegpt` | `{"conversations": [{"from": "human", "value": "…"}, …], "system": "…"}` |
| `alpaca` | `{"instruction": "…", "input": "…", "output": "…", "system": "…", "history": [["…", "…"]]}` |
| `prompt_completion` | `{"prompt": [messages], "completion": [messages]}`, as in TRL: only the completion is learnt |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from instar.data.text.foreign.chat_template import ASSISTANT, Messages, Options

Row = Mapping[str, Any]

_OLD_FORMS = {"functions": "tools", "function_call": "tool_calls"}
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", ASSISTANT), ASSISTANT),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
EXPECTED = {
    "messages": '{"messages": [{"role": "user", "content": "…"}, …]}',
    "sharegpt": '{"conversations": [{"from": "human", "value": "…"}, …]}',
    "alpaca": '{"instruction": "…", "input": "…", "output": "…"}',
    "prompt_completion": '{"prompt": [{"role": …}, …], "completion": [{"role": …}, …]}',
}
"""A row of each form"""
_KEY_OF_FORM = {
    "messages": "messages",
    "conversations": "sharegpt",
    "instruction": "alpaca",
    "completion": "prompt_completion",
}
"""Keys by which rows of a form are known"""


@dataclass(frozen=True)
class Conversation:
    """A row of a source of conversations."""

    messages: Messages
    options: Options
    """what else it gives to a chat template"""


def conversation_of(row: Row, form: str, *, last_answer_only: bool) -> Conversation:
    """Return the conversation of a row.

    Args:
        form: `data.chat_form`.
        last_answer_only: all answers but the last have weight 0.

    Raises:
        ValueError: the row has another form, or a message that a chat template cannot be given.
    """
    try:
        messages = _READERS[form](row)
    except _OtherFormError as other:
        forms = [name for key, name in _KEY_OF_FORM.items() if key in row and name != form]
        hint = f"; these rows look like data.chat_form: {forms[0]}" if forms else ""
        raise ValueError(f"{other}{hint}") from None
    _check(row, messages)
    if last_answer_only:
        answers = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT]
        earlier = frozenset(answers[:-1])
        messages = [
            {**message, "weight": 0} if number in earlier else message
            for number, message in enumerate(messages)
        ]
    return Conversation(messages, _options(row))


class _OtherFormError(ValueError):
    """A row lacks what its form has."""


def _messages(row: Row, key: str = "messages") -> list[Any]:
    messages = row.get(key)
    if not isinstance(messages, list) or not messages:
        raise _OtherFormError(f"a line of kind chat has a list `{key}`")
    return messages


def _of_sharegpt(row: Row) -> list[Any]:
    turns = _messages(row, "conversations")
    messages = _system(row)
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
            raise ValueError("each of `conversations` has `from` and `value`, both text")
        speaker = turn["from"]
        if speaker not in _SHAREGPT_ROLES:
            raise ValueError(
                f"`from` is {speaker!r}, which is none of {', '.join(_SHAREGPT_ROLES)}; calls of tools belong into "
                "`tool_calls` of the form messages"
            )
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        messages.append({"role": _SHAREGPT_ROLES[speaker], "content": turn.get("value"), **rest})
    return messages


def _of_alpaca(row: Row) -> list[Any]:
    instruction, output = row.get("instruction"), row.get("output")
    if not isinstance(instruction, str) or not isinstance(output, str):
        raise _OtherFormError("a row of the form alpaca has `instruction` and `output`, both text")
    more, history = row.get("input") or "", row.get("history") or []
    pairs = [pair for pair in history if _is_pair(pair)] if isinstance(history, list) else None
    if not isinstance(more, str) or pairs is None or len(pairs) < len(history):
        raise ValueError("`input` is text, and `history` a list of pairs of texts")
    question = f"{instruction}\n{more}" if more else instruction
    messages = _system(row)
    for asked, answered in (*pairs, (question, output)):
        messages += [_message("user", asked), _message(ASSISTANT, answered)]
    return messages


def _of_prompt(row: Row) -> list[Any]:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        raise ValueError(
            "`prompt` and `completion` are text that no chat template surrounds; make messages of them: "
            '[{"role": "user", "content": "…"}], [{"role": "assistant", "content": "…"}]'
        )
    if not (isinstance(prompt, list) and isinstance(completion, list) and completion):
        raise _OtherFormError(
            "a row of the form prompt_completion has two lists, `prompt` and `completion`"
        )
    earlier = [
        {**message, "weight": 0}
        if isinstance(message, dict) and message.get("role") == ASSISTANT
        else message
        for message in prompt
    ]
    return [*earlier, *completion]


_READERS: Mapping[str, Callable[[Row], list[Any]]] = {
    "messages": _messages,
    "sharegpt": _of_sharegpt,
    "alpaca": _of_alpaca,
    "prompt_completion": _of_prompt,
}


def _system(row: Row) -> list[Any]:
    system = row.get("system")
    if system in (None, ""):
        return []
    if not isinstance(system, str):
        raise ValueError("`system` is text")
    return [_message("system", system)]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) for t in pair)


def _check(row: Row, messages: list[Any]) -> None:
    """Raise ValueError if a template cannot be given the messages, or there is nothing to learn."""
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("each of `messages` has a `role`, which is text")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(
                "each of `messages` has a `role` and a `content`, both text; it may be null beside `tool_calls`"
            )
        weight = message.get("weight")
        if weight is not None and (weight not in (0, 1) or message["role"] != ASSISTANT):
            raise ValueError(f"`weight` is 0 or 1, of a message of the assistant, not {weight!r}")
    for old, new in _OLD_FORMS.items():
        if any(entry.get(old) is not None for entry in (row, *messages)):
            raise ValueError(f"`{old}` is of an older form of conversations: say `{new}`")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise ValueError("none of `messages` is the assistant's, so that there is nothing to learn")


def _options(row: Row) -> dict[str, Any]:
    options = {key: row[key] for key in ("tools", "documents") if row.get(key) not in (None, "")}
    for key, value in options.items():
        value = _parse_json(value) if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise ValueError(f"`{key}` is a list of objects")
        options[key] = value
    return options


def _parse_json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
