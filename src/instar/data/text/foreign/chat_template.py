"""Chat templates of transformers: conversations as text, and what of it the assistant writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from instar.config.errors import ConfigError
from instar.config.files import read_regular
from instar.config.language import DataConfig
from instar.data.text.foreign.special_tokens import TOKENIZER_CONFIG, read_json, special_tokens
from instar.data.text.tokenizer import BPETokenizer, Tokenizer, folder_of

PLAIN = """\
{%- for message in messages -%}
{{- '### ' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}{{- '\\n' -}}
{%- else -%}{{- message['content'] + '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '### assistant\\n' -}}{%- endif -%}
"""
"""The template of a model that has none."""
ASSISTANT = "assistant"
_GENERATION = "endgeneration"
_QUESTION, _ANSWER, _NEXT = "(question)", "(answer)", "(next)"

Message = Mapping[str, Any]
Messages = Sequence[Message]
Options = Mapping[str, Any]
"""what else a template is given: `tools`, `documents`, and variables of its own"""


@dataclass(frozen=True)
class Rendering:
    """Text of a conversation, and the characters [begin, end) of it that are trained."""

    text: str
    spans: Sequence[tuple[int, int]]
    of_template: bool = False
    """whether the template says the spans by `{% generation %}`"""


@dataclass(frozen=True)
class AnswerEnd:
    """What ends an answer."""

    token: str = ""
    """the special token; empty if there is none"""
    appended: str = ""
    """text up to that token, where a template writes it only with the next message"""
    only_last: str = ""
    """what follows the last answer of a conversation only"""
    text: str = ""
    """what follows an answer"""
    is_learnt: bool = True
    """whether anything does before the next message"""


@dataclass(frozen=True)
class ChatTemplate:
    """A template of transformers, in jinja2's sandbox, and the special tokens that it may name."""

    text: str
    special: dict[str, Any]
    tokens: tuple[str, ...] = ()
    """all special tokens of the tokenizer"""

    @property
    def marks_answers(self) -> bool:
        """Whether the template has `{% generation %}`."""
        return _GENERATION in self.text

    def renderings(self, messages: Messages, options: Options | None = None) -> list[Rendering]:
        """Return the texts to train on: the conversation, or one for each answer that the template renders
        otherwise when others follow; answers of weight 0 are no targets.

        Raises:
            ValueError: the template refuses the conversation, or what an answer adds cannot be told apart.
        """
        options = options or {}
        trained = [number for number, message in enumerate(messages) if _is_trained(message)]
        if self.marks_answers:
            (text,), (spans,) = self._rendered(messages, options, return_assistant_tokens_mask=True)
            kept = self._of_messages(messages, options, spans, trained)
            return [Rendering(str(text), kept, of_template=True)]
        answers = [
            number for number, message in enumerate(messages) if message["role"] == ASSISTANT
        ]
        added = {number: self._added(messages, number, options) for number in answers}
        text = self._text_of(messages, options)
        last = len(messages) - 1
        spans = {}
        for number, (prompt, through) in added.items():
            stays = through if number == last else through.removesuffix(self.end.only_last)
            if not text.startswith(stays):
                return [self._alone(*added[each]) for each in trained]
            spans[number] = (len(prompt), len(stays))
        ends = dict(spans)
        for number, (begin, end) in spans.items():
            if number == last:
                text += self.end.appended
                ends[number] = (begin, len(text))
            elif self.end.appended:
                first, upto = self._first_token(text[end:])
                if not text[end : end + first].strip():
                    ends[number] = (begin, end + upto)
        return [Rendering(text, [ends[number] for number in trained])]

    def _added(self, messages: Messages, number: int, options: Options) -> tuple[str, str]:
        """Return the prompt for an answer, and the text that begins with it and ends with the answer."""
        prompt = self._text_of(messages[:number], options, add_generation_prompt=True)
        through = self._text_of(messages[: number + 1], options)
        if not through.startswith(prompt):
            raise ValueError(
                "the chat template renders the prompt for an answer otherwise when the answer follows, so that "
                "the assistant's tokens cannot be told apart; give a data.chat_template with "
                "{% generation %} around them"
            )
        return prompt, through

    def _alone(self, prompt: str, through: str) -> Rendering:
        text = through + self.end.appended
        return Rendering(text, [(len(prompt), len(text))])

    def _of_messages(
        self,
        messages: Messages,
        options: Options,
        spans: Sequence[tuple[int, int]],
        trained: list[int],
    ) -> Sequence[tuple[int, int]]:
        """Return those of a template's spans that belong to the trained messages."""
        answers = [
            number for number, message in enumerate(messages) if message["role"] == ASSISTANT
        ]
        if answers == trained:
            return spans
        if len(spans) == len(answers):
            return [span for number, span in zip(answers, spans, strict=True) if number in trained]
        counts = [0]
        for number in answers:  # several of one message
            _, (before,) = self._rendered(
                messages[: number + 1], options, return_assistant_tokens_mask=True
            )
            counts.append(len(before))
        if counts != sorted(counts) or counts[-1] != len(spans):
            raise ValueError(
                "which of the template's {% generation %} are of the messages with weight 0 cannot be told"
            )
        first = dict(zip(answers, counts, strict=False))
        last = dict(zip(answers, counts[1:], strict=True))
        return [span for number in trained for span in spans[first[number] : last[number]]]

    def opened(self, said: str) -> tuple[str, str]:
        """Return the conversation that a user opens, up to the assistant's answer, and the text that ends an
        answer: a special token, if one does.

        Raises:
            ValueError: the template refuses the conversation.
        """
        text = self._text_of([_message("user", said)], {}, add_generation_prompt=True)
        return text, self.end.token or self.end.text or str(self.special.get("eos_token", ""))

    @cached_property
    def end(self) -> AnswerEnd:
        """What ends an answer, as the template renders one that is last, and one that another message follows;
        nothing is known of a template that refuses these messages.

        Raises:
            ValueError: the template leaves the answer out.
        """
        said = [_message("user", _QUESTION), _message(ASSISTANT, _ANSWER)]
        try:
            whole = self._text_of(said, {})
        except ValueError:
            return AnswerEnd()
        if _ANSWER not in whole:
            raise ValueError("the chat template leaves out what the assistant says")
        tail = whole.rpartition(_ANSWER)[2]
        try:
            longer = self._text_of([*said, _message("user", _NEXT)], {})
            opening = longer.rpartition(_ANSWER)[2].partition(_NEXT)[0]
        except ValueError:  # it takes one question only
            opening = tail
        if not tail.strip():
            begin, end = self._first_token(opening)
            if not end:
                return AnswerEnd(text=opening.strip(), is_learnt=False)
            return AnswerEnd(opening[begin:end], opening[:end].removeprefix(tail))
        begin, end = self._first_token(tail)
        common = next(n for n in range(len(tail), -1, -1) if opening.startswith(tail[:n]))
        for first, last in (*self._places(tail), *self._places(opening)):
            if first < common < last:
                common = first
        only_last = tail[common:] if 0 < end <= common else ""
        return AnswerEnd(tail[begin:end], only_last=only_last, text=tail.strip())

    def _places(self, text: str) -> list[tuple[int, int]]:
        """Return where special tokens are in a text."""
        if not self.tokens:
            return []
        longest_first = sorted(self.tokens, key=len, reverse=True)
        return [
            match.span() for match in re.finditer("|".join(map(re.escape, longest_first)), text)
        ]

    def _first_token(self, text: str) -> tuple[int, int]:
        """Return where the first special token is in a text; (0, 0) if there is none."""
        return next(iter(self._places(text)), (0, 0))

    @property
    def remark(self) -> str:
        """What a model will not learn from this template, in words; empty if there is nothing."""
        if not self.end.is_learnt:
            return (
                "nothing ends an answer in the chat template: the model will not learn to end one"
            )
        if not (self.marks_answers and self.end.token):
            return ""
        said = [_message("user", _QUESTION), _message(ASSISTANT, _ANSWER)]
        (text,), (spans,) = self._rendered(said, {}, return_assistant_tokens_mask=True)
        rest = str(text)[max((end for _, end in spans), default=0) :]
        if not (self.end.appended or self.end.token in rest):
            return ""
        return (
            f"the chat template leaves {self.end.token} out of its {{% generation %}}: the model will not "
            "learn to end an answer"
        )

    def _text_of(self, messages: Messages, options: Options, **more: Any) -> str:
        return str(self._rendered(messages, options, **more)[0][0])

    def _rendered(self, messages: Messages, options: Options, **more: Any) -> Any:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            return render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self.text,
                **{**self.special, **options, **more},
            )
        except ImportError:
            raise
        except Exception as error:  # a template of anyone's: whatever jinja2 makes of it
            raise ValueError(f"the chat template refuses it: {error}") from error


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _is_trained(message: Message) -> bool:
    return bool(message["role"] == ASSISTANT and message.get("weight") != 0)


def template_of(data: DataConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """Return `data.chat_template`, or the template beside the tokenizer, or else `PLAIN`."""
    given = None if data.chat_template is None else Path(data.chat_template)
    beside = folder_of(data.tokenizer)
    assert beside is not None  # the tokenizer is a file
    return template_beside(beside, tokenizer, given, follow=True)


def template_beside(
    beside: Path, tokenizer: Tokenizer, given: Path | None = None, *, follow: bool = False
) -> ChatTemplate:
    """Return the template in a file, or that of a folder with a tokenizer, or else `PLAIN` after what the
    tokenizer adds before a text.

    Args:
        follow: whether files of the folder may be symbolic links, as in the cache of the hub.
    """
    config = read_json(beside / TOKENIZER_CONFIG, follow=follow)
    special: dict[str, Any] = {"eos_token": tokenizer.end_token or ""}
    special |= special_tokens(beside, follow=follow)
    tokens = tokenizer.special if isinstance(tokenizer, BPETokenizer) else ()

    def template(text: str) -> ChatTemplate:
        return ChatTemplate(text, special, tokens)

    if given is not None:
        return template(_text(given, follow=True))
    if (beside / "chat_template.jinja").is_file():
        return template(_text(beside / "chat_template.jinja", follow=follow))
    found = config.get("chat_template")
    if isinstance(found, list):  # of several by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if isinstance(found, str):
        return template(found)
    begin = tokenizer.decode(tokenizer.before.tolist())
    return template(f"{{{{- {json.dumps(begin)} -}}}}\n{PLAIN}" if begin else PLAIN)


def _text(path: Path, *, follow: bool) -> str:
    try:
        return read_regular(path, follow=follow).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.one(
            f"data.chat_template: cannot read {path}: {error}", key="data.chat_template"
        ) from None
