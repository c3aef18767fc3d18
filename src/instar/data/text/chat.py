"""Conversations: JSON lines rendered by a chat template, of which only the assistant's tokens are targets.

A folder of prepared conversations is a data set of tokens with a second one of as many numbers in `marks`: bit 0
says that the token is a target, bit 1 that a conversation begins with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.config.files import read_regular
from instar.config.language import DataConfig
from instar.data.order import Int64Array
from instar.data.source import IGNORED, check_indices
from instar.data.split import Parts, divide_whole, whole
from instar.data.text.corpus import read_lines
from instar.data.text.foreign.special_tokens import TOKENIZER_CONFIG, read_json, special_tokens
from instar.data.text.shards import (
    ShardWriter,
    TokenizerRecord,
    TokenSplit,
    write_once,
    write_record,
)
from instar.data.text.tokenizer import (
    BPETokenizer,
    Tokenizer,
    folder_of,
    named_tokenizer,
    tokenizer_files,
)

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
MARKS = "marks"
TARGET, BEGINS = 1, 2
_GENERATION = "endgeneration"
_ANSWER = "(answer)"
_BATCH = 256
_SHARD_TOKENS = 1 << 23

Spans = Sequence[tuple[int, int]]
"""Characters [begin, end) of a rendered conversation that the assistant writes."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template of transformers, in jinja2's sandbox, and the special tokens that it may name."""

    text: str
    special: dict[str, Any]

    def render(self, messages: Sequence[dict[str, Any]]) -> tuple[str, Spans]:
        """Returns a conversation as text, and what of it the assistant writes.

        A template says the latter by `{% generation %}`. Of others, it is what each message of the assistant adds
        to the messages before it and the prompt for it.

        Raises:
            ValueError: the template refuses the conversation, or what it adds cannot be told apart.
        """
        if _GENERATION in self.text:
            (text,), (spans,) = self._rendered(messages, return_assistant_tokens_mask=True)
            return str(text), spans
        text = self._text_of(messages)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                begin = self._text_of(messages[:number], add_generation_prompt=True)
                end = self._text_of(messages[: number + 1])
                if not (end.startswith(begin) and text.startswith(end)):
                    raise ValueError(
                        "the chat template renders a message otherwise when others follow, so that the "
                        "assistant's tokens cannot be told apart; give a data.chat_template with "
                        "{% generation %} around them"
                    )
                spans.append((len(begin), len(end)))
        return text, spans

    def opened(self, said: str) -> tuple[str, str]:
        """Returns the conversation that a user opens, up to the assistant's answer, and the text that ends an answer.

        Raises:
            ValueError: the template refuses the conversation.
        """
        question = {"role": "user", "content": said}
        text = self._text_of([question], add_generation_prompt=True)
        whole = self._text_of([question, {"role": "assistant", "content": _ANSWER}])
        return text, whole.partition(_ANSWER)[2].strip() or self.special["eos_token"]

    def _text_of(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        return str(self._rendered(messages, **options)[0][0])

    def _rendered(self, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            return render_jinja_template(
                conversations=[list(messages)],
                chat_template=self.text,
                **options,
                **self.special,
            )
        except ImportError:
            raise
        except Exception as error:  # a template of anyone's: whatever jinja2 makes of it
            raise ValueError(f"the chat template refuses it: {error}") from error


def template_of(data: DataConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """Returns `data.chat_template`, or the template beside the tokenizer, or else `PLAIN`."""
    given = None if data.chat_template is None else Path(data.chat_template)
    beside = folder_of(data.tokenizer)
    assert beside is not None  # the tokenizer is a file
    return template_beside(beside, tokenizer, given, follow=True)


def template_beside(
    beside: Path, tokenizer: Tokenizer, given: Path | None = None, *, follow: bool = False
) -> ChatTemplate:
    """Returns the template in a file, or that of a folder with a tokenizer, or else `PLAIN`.

    Args:
        follow: whether files of the folder may be symbolic links, as in the cache of the hub.
    """
    config = read_json(beside / TOKENIZER_CONFIG, follow=follow)
    special: dict[str, Any] = {"eos_token": tokenizer.end_token or ""}
    special |= special_tokens(beside, follow=follow)
    if given is not None:
        return ChatTemplate(_text(given, follow=True), special)
    if (beside / "chat_template.jinja").is_file():
        return ChatTemplate(_text(beside / "chat_template.jinja", follow=follow), special)
    found = config.get("chat_template")
    if isinstance(found, list):  # of several by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return ChatTemplate(found if isinstance(found, str) else PLAIN, special)


def _text(path: Path, *, follow: bool) -> str:
    try:
        return read_regular(path, follow=follow).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.one(
            f"data.chat_template: cannot read {path}: {error}", key="data.chat_template"
        ) from None


def conversations(source: str) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yields the bytes and the messages of each line.

    Raises:
        ConfigError: a line has no list `messages` of objects with `role` and `content`, both text, of which one is the
            assistant's; names file and line.
    """
    for path, number, line in read_lines(source):
        try:
            messages = msgspec.json.decode(line).get("messages")
        except (msgspec.DecodeError, AttributeError):
            messages = None
        if problem := _problem(messages):
            raise ConfigError.one(
                problem,
                where=f"{path}:{number}",
                hint='a line is {"messages": [{"role": "user", "content": "…"}, …]}',
                key="data.source",
            )
        yield len(line), messages


def _problem(messages: Any) -> str:
    if not isinstance(messages, list) or not messages:
        return "a line of kind chat has a list `messages`"
    for message in messages:
        texts = isinstance(message, dict) and [message.get("role"), message.get("content")]
        if not texts or not all(isinstance(text, str) for text in texts):
            return "each of `messages` has a `role` and a `content`, both text"
    if not any(message["role"] == "assistant" for message in messages):
        return "none of `messages` is the assistant's, so that there is nothing to learn"
    return ""


def divided(data: DataConfig, seed: int) -> dict[str, tuple[str, Parts]]:
    """Returns the source and the conversations of each split; all lines are read and checked."""

    def sizes(source: str) -> Int64Array:
        return np.fromiter((size for size, _ in conversations(source)), np.int64)

    first = sizes(data.source)
    if data.val_source is None and first.size:
        parts = divide_whole(first, data.val_fraction, data.test_fraction, seed)
        if parts is not None:
            return {name: (data.source, rows) for name, rows in parts.items()}
    elif data.val_source is not None and first.size:
        held = sizes(data.val_source)
        return {
            "train": (data.source, whole(np.arange(first.size), first)),
            "val": (data.val_source, whole(np.arange(held.size), held)),
        }
    raise ConfigError.one(
        f"{data.source}: {first.size} conversations, too few or too unequal to hold out whole ones",
        where="data.val_source",
        hint="give conversations to hold out in data.val_source, or other fractions",
        key="data.val_source",
    )


def write_conversations(
    aside: Path, data: DataConfig, seed: int, source: dict[str, Any]
) -> dict[str, int]:
    """Writes a folder of prepared conversations; returns the tokens of each split.

    Args:
        source: what it is made from, for its record.

    Raises:
        ConfigError: a line is no conversation, or the template refuses it.
    """
    tokenizer = named_tokenizer(data.tokenizer)
    if not isinstance(tokenizer, BPETokenizer):
        raise ConfigError.one(
            f"data.kind chat needs a tokenizer.json, not {data.tokenizer}", key="data.tokenizer"
        )
    template = template_of(data, tokenizer)
    splits = divided(data, seed)
    record = TokenizerRecord(tokenizer.kind, tokenizer.fingerprint)
    (aside / MARKS).mkdir()
    written: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, (path, parts) in splits.items():
        writers = [
            ShardWriter(
                folder,
                name,
                tokenizer=tokenizer.fingerprint,
                vocab_size=size,
                shard_tokens=_SHARD_TOKENS,
            )
            for folder, size in ((aside, tokenizer.vocab_size), (aside / MARKS, 4))
        ]
        for tokens, marks in _encoded(path, set(parts[:, 0].tolist()), template, tokenizer):
            writers[0].append(tokens)
            writers[1].append(marks)
        for found, writer in zip(written, writers, strict=True):
            found[name] = writer.close()
    for folder, size, found in (
        (aside / MARKS, 4, written[1]),
        (aside, tokenizer.vocab_size, written[0]),
    ):
        for name, content in tokenizer_files(tokenizer).items():
            write_once(folder / name, content)
        write_record(folder, tokenizer=record, vocab_size=size, splits=found, source=source)
    return {name: sum(shard.count for shard in shards) for name, shards in written[0].items()}


def _encoded(
    source: str, wanted: set[int], template: ChatTemplate, tokenizer: BPETokenizer
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yields tokens and marks of the conversations wanted. Special tokens in their text are those of the template:
    transformers does not tell them apart either."""
    fast = parsing(tokenizer)
    batch: list[tuple[str, Spans]] = []

    def tokens() -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        found = fast.encode_batch([text for text, _ in batch], add_special_tokens=False)
        for encoding, (_, spans) in zip(found, batch, strict=True):
            yield np.array(encoding.ids, np.uint32), _marks(encoding.offsets, spans)

    for number, (_, messages) in enumerate(conversations(source)):
        if number in wanted:
            try:
                batch.append(template.render(messages))
            except (ValueError, ImportError) as error:
                where = f"{source}: conversation {number + 1}"
                raise ConfigError.one(str(error), where=where, key="data.source") from None
        if len(batch) == _BATCH:
            yield from tokens()
            batch = []
    yield from tokens()


def parsing(tokenizer: BPETokenizer) -> tokenizers.Tokenizer:
    """Returns a tokenizer that reads the names of special tokens in a text as these."""
    fast = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    fast.no_truncation()
    fast.no_padding()
    return fast


def _marks(offsets: Sequence[tuple[int, int]], spans: Spans) -> NDArray[np.uint8]:
    """Returns the marks of tokens that stand for these characters: what overlaps a span is a target."""
    places = np.array(offsets, np.int64).reshape(-1, 2)
    marks = np.zeros(len(places), np.uint8)
    for begin, end in spans:
        marks[(places[:, 1] > begin) & (places[:, 0] < end) & (places[:, 1] > places[:, 0])] = (
            TARGET
        )
    marks[:1] |= BEGINS
    return marks


class ChatSamples:
    """A source of `context` tokens per sample, whose targets are the assistant's; other targets are -1.

    Packed, samples are windows over conversations end to end; else, a sample is one conversation, cut off after
    the context. What has no target is no sample.
    """

    def __init__(
        self, tokens: TokenSplit, marks: TokenSplit, context: int, *, packing: bool
    ) -> None:
        self._tokens, self._marks, self.context = tokens, marks, context
        every = marks.read(0, len(marks))
        if packing:
            begins = np.arange(0, len(every) - 1, context, dtype=np.int64)
            ends = np.minimum(begins + context + 1, len(every))
        else:
            begins = np.flatnonzero(every & BEGINS).astype(np.int64)
            ends = np.minimum(np.append(begins[1:], len(every)), begins + context + 1)
        targets = np.concatenate([[0], np.cumsum(every & TARGET, dtype=np.int64)])
        counts: Int64Array = targets[ends] - targets[np.minimum(begins + 1, ends)]
        used = counts > 0
        self._begins, self._ends, self._counts = begins[used], ends[used], counts[used]
        if not used.any():
            raise ConfigError.one(
                f"no sample of the {tokens.name} split has a token of the assistant within {context:,} tokens",
                where="model.context",
                hint="a longer context",
                key="model.context",
            )
        how = "packed" if packing else "one"
        self.fingerprint = f"{tokens.fingerprint}/{marks.fingerprint}/{how}/{context}"

    def __len__(self) -> int:
        return self._begins.size

    def weights(self, indices: Int64Array) -> float:
        """Return the number of targets in the samples."""
        return float(self._counts[indices].sum())

    def read(self, indices: Int64Array, epoch: int = 0) -> dict[str, NDArray[Any]]:  # noqa: ARG002
        """Return `inputs` and `targets`, int64 [len(indices), context], contiguous.

        Raises IndexError outside 0 … len-1.
        """
        check_indices(indices, len(self))
        inputs = np.zeros((indices.size, self.context), dtype=np.int64)
        targets = np.full_like(inputs, IGNORED)
        places = zip(self._begins[indices].tolist(), self._ends[indices].tolist(), strict=True)
        for row, (begin, end) in enumerate(places):
            tokens, marks = self._tokens.read(begin, end), self._marks.read(begin, end)
            size = end - begin - 1
            inputs[row, :size] = tokens[:-1]
            targets[row, :size] = np.where(marks[1:] & TARGET, tokens[1:].astype(np.int64), IGNORED)
        return {"inputs": inputs, "targets": targets}
