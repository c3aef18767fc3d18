"""Chat templates that others publish, those in TRL's wheel: what is trained is what transformers renders, or refused by name.

A template with `{% generation %}` says itself what is trained. Of one without, an answer is what follows the prompt
that inference gives, as the template renders that answer.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import trl
from cases import parametrize_first
from transformers.utils.chat_template_utils import render_jinja_template

from instar.data.text.foreign.chat_template import ChatTemplate, Rendering

FOLDER = Path(trl.__file__).parent / "chat_templates"
OF_IMAGES = {"idefics3", "llava_next", "qwen2_5_vl", "qwen3_vl", "smolvlm"}
"""Templates whose contents are lists of parts"""
PAIRS = sorted(
    name
    for path in FOLDER.glob("*_training.jinja")
    if (name := path.stem.removesuffix("_training")) not in OF_IMAGES
)
"""Templates that are there as published, and once more with `{% generation %}`"""
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
ENDS = {"qwen": "<|im_end|>", "llama3": "<|eot_id|>", "phi3": "<|endoftext|>"}
TOKEN = re.compile(r"<[|｜][^|｜<>]+[|｜]>|<(?:start|end)_of_turn>|<bos>|<eos>")
THOUGHTS_OPENED = {
    *("deepseek_r1_distill", "deepseekv3", "nemotron_3_5_lightning", "nemotron_3_nano"),
    *("nemotron_3_super", "nemotron_3_ultra", "qwen3_5_nothink"),
}
"""Their prompt begins with a thought, or with none, and an answer of the conversation otherwise: refused for some rows"""


def chat_message(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
NUMBER = {"type": "integer", "description": "a number"}
ADD = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "+", "parameters": ADD}}]
QUESTION, ANSWER = chat_message("user", "Why?"), chat_message("assistant", "Because.")
SECOND = [chat_message("user", "And?"), chat_message("assistant", "So.")]
RESULT = [chat_message("tool", "3", name="add"), chat_message("assistant", "It is 3.")]
ROWS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a turn": ([QUESTION, ANSWER], {}),
    "two turns": ([QUESTION, ANSWER, *SECOND], {}),
    "a system turn": ([chat_message("system", "Be kind."), QUESTION, ANSWER], {}),
    "a system turn and two": ([chat_message("system", "Be kind."), QUESTION, ANSWER, *SECOND], {}),
    "tools": (
        [chat_message("user", "1+2?"), chat_message("assistant", "", tool_calls=[CALL]), *RESULT],
        {"tools": TOOLS},
    ),
    "tools, no content": (
        [chat_message("user", "1+2?"), chat_message("assistant", None, tool_calls=[CALL]), *RESULT],
        {"tools": TOOLS},
    ),
    "thoughts": (
        [
            *(QUESTION, chat_message("assistant", "<think>\nhm\n</think>\n\nBecause.")),
            *(SECOND[0], chat_message("assistant", "<think>\nno\n</think>\n\nSo.")),
        ],
        {},
    ),
    "spaces": (
        [chat_message("user", "  naïve 再见 ✓\n"), chat_message("assistant", " two\n\nlines 🦋 ")],
        {},
    ),
}


def template(name: str) -> ChatTemplate:
    text = (FOLDER / f"{name}.jinja").read_text()
    return ChatTemplate(text, special(name), tuple({*TOKEN.findall(text), "<bos>", "<eos>"}), name)


def special(name: str) -> dict[str, str]:
    end = next((end for start, end in ENDS.items() if name.startswith(start)), "<eos>")
    return {**SPECIAL, "eos_token": end}


def render(name: str, messages: list[dict[str, Any]], **more: Any) -> Any:
    """What transformers makes of it; None if the template refuses it."""
    text = (FOLDER / f"{name}.jinja").read_text()
    try:
        return render_jinja_template(
            conversations=[messages], chat_template=text, **special(name), **more
        )
    except Exception:  # whatever a template of anyone's raises
        return None


@parametrize_first("name", PAIRS, first=2)
def test_a_template_that_marks_answers_is_trained_where_transformers_marks_them(name: str) -> None:
    chat_template, equal = template(f"{name}_training"), 0
    for messages, options in ROWS.values():
        reference = render(
            f"{name}_training", messages, return_assistant_tokens_mask=True, **options
        )
        if reference is None:
            with pytest.raises(ValueError, match="the chat template refuses it"):
                chat_template.renderings(messages, options)
            continue
        (text,), (spans,) = reference
        (rendering,) = chat_template.renderings(messages, options)
        assert rendering.text == text
        assert [*rendering.spans] == [tuple(span) for span in spans]
        equal += 1
    assert equal >= 4


@parametrize_first("name", PAIRS, first=2)
def test_an_answer_is_what_follows_the_prompt_of_inference_or_the_row_is_refused(name: str) -> None:
    chat_template, equal, refusals = template(name), 0, 0
    for messages, options in ROWS.values():
        if options and "tool_calls" not in chat_template.text:
            continue  # which is refused where conversations are read
        reference = render(name, messages, **options)
        try:
            renderings = chat_template.renderings(messages, options)
        except ValueError as error:
            refusals += reference is not None
            if reference is not None and "give a data.chat_template" not in str(error):
                raise
            continue
        assert reference is not None
        check(name, renderings, messages, options, reference[0][0], chat_template.end.suffix)
        equal += 1
    assert (refusals > 0) == (name in THOUGHTS_OPENED)
    assert equal >= (4 if name not in THOUGHTS_OPENED else 0)


def check(
    name: str,
    renderings: list[Rendering],
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    conversation_text: str,
    suffix: str,
) -> None:
    """The spans are the answers, each after its prompt; texts are the conversation's, or that up to an answer.

    Args:
        suffix: an end that the template writes only with the next message, and that is learnt at the last one.
    """
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    spans = [(rendering.text, *span) for rendering in renderings for span in rendering.spans]
    assert len(spans) == len(answers)
    if len(renderings) == 1:
        assert renderings[0].text.removesuffix(suffix) == conversation_text.removesuffix(suffix)
    for number, (text, begin, end) in zip(answers, spans, strict=True):
        prompt = render(name, messages[:number], add_generation_prompt=True, **options)
        through = render(name, messages[: number + 1], **options)
        assert text[:begin] == prompt[0][0]
        if len(renderings) > 1:
            assert text[:end].removesuffix(suffix) == through[0][0].removesuffix(suffix)
        content = messages[number]["content"] or CALL["function"]["name"]  # type: ignore[index]
        assert content.rpartition("</think>")[2].strip() in text[begin:end]
