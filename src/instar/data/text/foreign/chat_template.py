"""Chat templates of transformers: conversations as text, and what of it the assistant writes."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from instar.config.errors import ConfigError
from instar.config.files import read_regular
from instar.config.language import DataConfig
from instar.data.text.foreign.limited import LimitedProcess, RequestFailed
from instar.data.text.foreign.special_tokens import TOKENIZER_CONFIG, read_json_file, special_tokens
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

LIMIT_S = 20
"""for the texts of a conversation"""
_TEXTS_BYTES = 4 << 20
"""of conversations whose texts are asked for at once: they come with all that precedes each answer"""

Message = Mapping[str, Any]
Messages = Sequence[Message]
Spans = Sequence[tuple[int, int]]
Options = Mapping[str, Any]
"""what else a template is given: `tools`, `documents`, and variables of its own"""


@dataclass(frozen=True)
class Rendering:
    """Text of a conversation, and the characters [begin, end) of it that are trained."""

    text: str
    spans: Spans
    of_template: bool = False
    """whether the template says the spans by `{% generation %}`"""


@dataclass(frozen=True)
class AnswerEnd:
    """What ends an answer."""

    token: str = ""
    """the special token; empty if there is none"""
    suffix: str = ""
    """text up to that token, where a template writes it only with the next message"""
    only_last: str = ""
    """what follows the last answer of a conversation only"""
    text: str = ""
    """what follows an answer"""
    is_learnt: bool = True
    """whether anything does before the next message"""


@dataclass(frozen=True)
class ChatTemplate:
    """A template of transformers, in jinja2's sandbox, and the special tokens that it may name.

    It is rendered in a process with limits: what ends for no conversation, or fills the memory, raises ConfigError.
    """

    text: str
    special: dict[str, Any]
    tokens: tuple[str, ...] = ()
    """all special tokens of the tokenizer"""
    origin: str = ""
    """file that has the template, for messages"""

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
        count = len(messages)
        targets = [number for number, message in enumerate(messages) if _is_trained(message)]
        if self.marks_answers:
            ((text, answer_spans),) = self._mark(messages, options, [count])
            renderings = self._of_messages(messages, options, answer_spans, targets)
            return [Rendering(text, renderings, of_template=True)]
        answers = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT]
        prompts = [(number, True) for number in answers]
        throughs = [(number + 1, False) for number in answers]
        *parts, text = self._texts(messages, options, [*prompts, *throughs, (count, False)])
        pairs = zip(parts[: len(answers)], parts[len(answers) :], strict=True)
        suffixes = dict(zip(answers, pairs, strict=True))
        if not all(through.startswith(prompt) for prompt, through in suffixes.values()):
            raise ValueError(
                "the chat template renders the prompt for an answer otherwise when the answer follows, so that "
                "the assistant's tokens cannot be told apart; give a data.chat_template with "
                "{% generation %} around them"
            )
        last = count - 1
        spans = {}
        for number, (prompt, through) in suffixes.items():
            stays = through if number == last else through.removesuffix(self.end.only_last)
            if not text.startswith(stays):
                return [self._of_answer(*suffixes[number]) for number in targets]
            spans[number] = (len(prompt), len(stays))
        ends = dict(spans)
        for number, (begin, end) in spans.items():
            if number == last:
                text += self.end.suffix
                ends[number] = (begin, len(text))
            elif self.end.suffix:
                first, upto = self._first_token(text[end:])
                if not text[end : end + first].strip():
                    ends[number] = (begin, end + upto)
        return [Rendering(text, [ends[number] for number in targets])]

    def _of_answer(self, prompt: str, through: str) -> Rendering:
        text = through + self.end.suffix
        return Rendering(text, [(len(prompt), len(text))])

    def _of_messages(
        self, messages: Messages, options: Options, spans: Spans, targets: list[int]
    ) -> Spans:
        """Return those of a template's spans that belong to the trained messages."""
        answers = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT]
        if answers == targets:
            return spans
        if len(spans) == len(answers):
            return [span for number, span in zip(answers, spans, strict=True) if number in targets]
        through = self._mark(messages, options, [number + 1 for number in answers])
        counts = [0, *(len(before) for _, before in through)]  # several of one message
        if counts != sorted(counts) or counts[-1] != len(spans):
            raise ValueError(
                "which of the template's {% generation %} are of the messages with weight 0 cannot be told"
            )
        first = dict(zip(answers, counts, strict=False))
        last = dict(zip(answers, counts[1:], strict=True))
        return [span for number in targets for span in spans[first[number] : last[number]]]

    def around_answer(self, question: str) -> tuple[str, str]:
        """Return the conversation that a user opens, up to the assistant's answer, and the text that ends an
        answer: a special token, if one does.

        Raises:
            ValueError: the template refuses the conversation.
        """
        text = self.prompt([_message("user", question)])
        return text, self.end.token or self.end.text or str(self.special.get("eos_token", ""))

    def prompt(self, messages: Messages) -> str:
        """Return the text of messages, up to where the assistant's answer begins.

        Raises:
            ValueError: the template refuses them.
        """
        return self._texts(messages, {}, [(len(messages), True)])[0]

    @cached_property
    def end(self) -> AnswerEnd:
        """What ends an answer, as the template renders one that is last, and one that another message follows;
        nothing is known of a template that refuses these messages.

        Raises:
            ValueError: the template leaves the answer out.
        """
        messages = [_message("user", _QUESTION), _message(ASSISTANT, _ANSWER)]
        try:
            (text,) = self._texts(messages, {}, [(2, False)])
        except ValueError:
            return AnswerEnd()
        if _ANSWER not in text:
            raise ValueError("the chat template leaves out what the assistant says")
        tail = text.rpartition(_ANSWER)[2]
        try:
            (longer,) = self._texts([*messages, _message("user", _NEXT)], {}, [(3, False)])
            opening = longer.rpartition(_ANSWER)[2].partition(_NEXT)[0]
        except ValueError:  # it takes one question only
            opening = tail
        if not tail.strip():
            begin, end = self._first_token(opening)
            if not end:
                return AnswerEnd(text=opening.strip(), is_learnt=False)
            return AnswerEnd(opening[begin:end], opening[:end].removeprefix(tail))
        begin, end = self._first_token(tail)
        is_equal = map(operator.eq, tail, opening)
        shorter = min(len(tail), len(opening))
        common = next((n for n, same in enumerate(is_equal) if not same), shorter)
        for first, last in (*self._places(tail), *self._places(opening)):
            if first < common < last:
                common = first
        only_last = tail[common:] if 0 < end <= common else ""
        return AnswerEnd(tail[begin:end], only_last=only_last, text=tail.strip())

    def _places(self, text: str) -> list[tuple[int, int]]:
        """Return where special tokens are in a text."""
        if not self.tokens:
            return []
        pattern = "|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True)))
        return [match.span() for match in re.finditer(pattern, text)]

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
        messages = [_message("user", _QUESTION), _message(ASSISTANT, _ANSWER)]
        ((text, spans),) = self._mark(messages, {}, [2])
        ending = text[max((end for _, end in spans), default=0) :]
        if not (self.end.suffix or self.end.token in ending):
            return ""
        return (
            f"the chat template leaves {self.end.token} out of its {{% generation %}}: the model will not "
            "learn to end an answer"
        )

    def _texts(
        self, messages: Messages, options: Options, parts: Sequence[tuple[int, bool]]
    ) -> list[str]:
        """Return the texts of first messages, each with a prompt for an answer if that is said."""
        return [text for text, _ in self._render(messages, options, parts, spans=False)]

    def _mark(
        self, messages: Messages, options: Options, counts: Sequence[int]
    ) -> list[tuple[str, Spans]]:
        """Return the texts of first messages, and their places of `{% generation %}`."""
        return self._render(messages, options, [(count, False) for count in counts], spans=True)

    def _render(
        self,
        messages: Messages,
        options: Options,
        parts: Sequence[tuple[int, bool]],
        *,
        spans: bool,
    ) -> list[tuple[str, Spans]]:
        """Raise ValueError if the template refuses, ConfigError if it takes too much."""
        variables = {**self.special, **options}
        try:
            request = json.dumps({"messages": list(messages), "variables": variables}).encode()
        except (RecursionError, ValueError) as error:
            raise ValueError(f"a chat template cannot be given it: {error}") from error
        batch_size = max(1, _TEXTS_BYTES // len(request))
        renderings: list[tuple[str, Spans]] = []
        for first in range(0, len(parts), batch_size):
            message = {"ask": "render", "texts": parts[first : first + batch_size], "spans": spans}
            try:
                reply, _ = _process(self.text).ask(message, request)
            except RequestFailed as error:
                raise ConfigError.of(
                    f"the chat template cannot be rendered: {error}",
                    where=self.origin,
                    hint="give a template that ends, as a file, in data.chat_template",
                ) from None
            if "missing" in reply:
                raise ImportError(reply["missing"])
            if "refused" in reply:
                raise ValueError(f"the chat template refuses it: {reply['refused']}")
            places = [[(begin, end) for begin, end in text_spans] for text_spans in reply["spans"]]
            renderings += zip(reply["texts"], places, strict=True)
        return renderings


@lru_cache(maxsize=1)
def _process(text: str) -> LimitedProcess:
    return LimitedProcess("template", text.encode("utf-8", "surrogatepass"), LIMIT_S)


def release() -> None:
    """End the process that renders, which would stay; the next rendering starts another."""
    _process.cache_clear()


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _is_trained(message: Message) -> bool:
    return bool(message["role"] == ASSISTANT and message.get("weight") != 0)


def template_of(data: DataConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """Return `data.chat_template`, or the template beside the tokenizer, or else `PLAIN`."""
    file = None if data.chat_template is None else Path(data.chat_template)
    folder = folder_of(data.tokenizer)
    assert folder is not None  # the tokenizer is a file
    return template_beside(folder, tokenizer, file, follow=True)


def template_beside(
    folder: Path, tokenizer: Tokenizer, chosen_file: Path | None = None, *, follow: bool = False
) -> ChatTemplate:
    """Return the template in a file, or that of a folder with a tokenizer, or else `PLAIN` after what the
    tokenizer adds before a text.

    Args:
        follow: whether files of the folder may be symbolic links, as in the cache of the hub.
    """
    config = read_json_file(folder / TOKENIZER_CONFIG, follow=follow)
    special: dict[str, Any] = {"eos_token": tokenizer.end_token or ""}
    special |= special_tokens(folder, follow=follow)
    tokens = tokenizer.special if isinstance(tokenizer, BPETokenizer) else ()

    def template(text: str, origin: Path) -> ChatTemplate:
        return ChatTemplate(text, special, tokens, str(origin))

    if chosen_file is not None:
        return template(_text(chosen_file, follow=True), chosen_file)
    if (file := folder / "chat_template.jinja").is_file():
        return template(_text(file, follow=follow), file)
    entry = config.get("chat_template")
    if isinstance(entry, list):  # of several by name
        by_name = {e.get("name"): e.get("template") for e in entry if isinstance(e, dict)}
        entry = by_name.get("default")
    if isinstance(entry, str):
        return template(entry, folder / TOKENIZER_CONFIG)
    begin = tokenizer.decode(tokenizer.before.tolist())
    return template(f"{{{{- {json.dumps(begin)} -}}}}\n{PLAIN}" if begin else PLAIN, folder)


def _text(path: Path, *, follow: bool) -> str:
    try:
        return read_regular(path, follow=follow).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of(
            f"data.chat_template: cannot read {path}: {error}", key="data.chat_template"
        ) from None
