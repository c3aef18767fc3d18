"""Chat templates of others: what never ends is ended, and all else is rendered as transformers renders it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import parametrize_first
from transformers.utils.chat_template_utils import render_jinja_template

from instar.config.errors import ConfigError
from instar.data.text.foreign import chat_template
from instar.data.text.foreign.chat_template import ChatTemplate, release, template_beside
from instar.data.text.tokenizer import train_bpe

ASKED = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4 – ✓\ud800"}]
DOUBLED = "{% set n = namespace(x='ab') %}{% for i in range(COUNT) %}{% set n.x = n.x + n.x %}{% endfor %}"
HOSTILE = {
    "loops in loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "it takes more than 1 s",
    ),
    "a text that doubles": (DOUBLED.replace("COUNT", "60"), "MiB of memory"),
    "a text of 64 MiB": (
        DOUBLED.replace("COUNT", "25") + "{{ n.x }}",
        r"it makes a text of 67,108,864 characters",
    ),
    "a number of a million digits": ("{{ 9 ** (9 ** 9) }}", "it takes more than 1 s"),
}
REFUSED = {
    "a long range": "{% for i in range(10**9) %}{% endfor %}",
    "a macro of itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nested too deep": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
}


@parametrize_first("case", HOSTILE, first=1)
def test_a_template_without_end_is_an_error_that_names_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, message = HOSTILE[case]
    if message.endswith(" 1 s"):
        monkeypatch.setattr(chat_template, "LIMIT_S", 1)
    tokenizer = train_bpe(["abc"], 257)
    (tmp_path / "chat_template.jinja").write_text(text)
    template = template_beside(tmp_path, tokenizer)
    with pytest.raises(ConfigError, match=message) as error:
        template.renderings(ASKED)
    assert str(tmp_path / "chat_template.jinja") in str(error.value)
    assert "data.chat_template" in str(error.value)


def test_a_process_that_was_ended_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LIMIT_S", 1)
    text = "{% if messages[0].content == 'loop' %}" + HOSTILE["loops in loops"][0]
    template = ChatTemplate(text + "{% endif %}{{ messages[0].content }}", {})
    with pytest.raises(ConfigError, match="more than 1 s"):
        template.prompt([{"role": "user", "content": "loop"}])
    assert template.prompt([{"role": "user", "content": "4"}]) == "4"
    release()


@parametrize_first("case", REFUSED, first=2)
def test_a_template_that_jinja2_refuses_is_refused(case: str) -> None:
    with pytest.raises(ValueError, match=r"refuses it: (Range too big|maximum recursion|.*nested)"):
        ChatTemplate(REFUSED[case], {}).renderings(ASKED)


HONEST = (
    "{%- set n = namespace(turns=0) -%}{{ bos_token }}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'nobody' %}{% continue %}{% endif %}{% set n.turns = n.turns + 1 %}"
    "<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content | trim }}{% endif %}\n{% endfor %}{{ n.turns }}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_texts_and_places_are_transformers_own() -> None:
    special = {"bos_token": "<s>"}
    options = {"tools": [{"type": "function", "function": {"name": "é", "x": [1, 2.5, None]}}]}
    template = ChatTemplate(HONEST, special)
    more: dict[str, Any] = {"return_assistant_tokens_mask": True}
    (text,), (places,) = render_jinja_template(
        conversations=[ASKED], chat_template=HONEST, **special, **options, **more
    )
    (rendering,) = template.renderings(ASKED, options)
    assert rendering.text == text
    assert [*rendering.spans] == places
    (text,), _ = render_jinja_template(
        conversations=[ASKED], chat_template=HONEST, add_generation_prompt=True, **special
    )
    assert template.prompt(ASKED) == text


def test_a_long_conversation_is_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {})
    expected = template.renderings(ASKED * 5)
    monkeypatch.setattr(chat_template, "_TEXTS_BYTES", 1)
    assert template.renderings(ASKED * 5) == expected
