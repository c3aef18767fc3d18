"""Conversations: JSON lines rendered by a chat template, of which only the assistant's tokens are targets.

A folder of prepared conversations is a data set of tokens with a second one of as many numbers in `marks`: bit 0
says that the token is a target, bit 1 that a conversation begins with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.config.language import DataConfig
from instar.data.columns import Column
from instar.data.order import Int64Array
from instar.data.source import IGNORED, TokenSequence, check_indices
from instar.data.split import Parts, divide_whole, whole_documents
from instar.data.text.chat_forms import EXPECTED, Conversation, conversation_of
from instar.data.text.corpus import read_lines
from instar.data.text.files import parse_row
from instar.data.text.foreign.chat_template import ChatTemplate, Rendering, release, template_of
from instar.data.text.foreign.engine import Places
from instar.data.text.shards import (
    Shard,
    ShardWriter,
    TokenizerRecord,
    write_once,
    write_record,
)
from instar.data.text.targets import documents_between
from instar.data.text.tokenizer import BPETokenizer, named_tokenizer, tokenizer_files

MARKS = "marks"
TARGET, BEGINS = 1, 2
_MARK_VALUES = 4
_BATCH = 256
_SHARD_TOKENS = 1 << 23
Say = Callable[[str], None]


def conversations(source: str, data: DataConfig) -> Iterator[tuple[int, Conversation]]:
    """Yield the bytes and the conversation of each line.

    Raises:
        ConfigError: a line is no conversation of the form that the config says, of which one message is the
            assistant's, or what a chat template cannot be given; names file and line.
    """
    form, last_answer_only = data.chat_form, data.chat_answers == "last"
    for path, number, line in read_lines(source):
        try:
            row = parse_row(line)
            row = row if isinstance(row, dict) else {}
            conversation = conversation_of(row, form, last_answer_only=last_answer_only)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            is_json = not isinstance(error, msgspec.DecodeError | RecursionError)
            raise ConfigError.of(
                str(error) if is_json else f"this line is not JSON: {error}",
                where=f"{path}:{number}",
                hint=f"a line is {EXPECTED[form]}",
                key="data.source",
            ) from None
        yield len(line), conversation


@dataclass(frozen=True)
class _Lines:
    """What is known of all conversations of a source."""

    sizes: Int64Array
    """bytes of each line"""
    digests: list[bytes]
    """equal for conversations that a template is given alike"""

    @classmethod
    def of(cls, source: str, data: DataConfig) -> _Lines:
        sizes, digests = [], []
        for size, conversation in conversations(source, data):
            parts = conversation.messages, conversation.options
            content = msgspec.json.encode(parts, order="sorted")
            sizes.append(size)
            digests.append(xxhash.xxh3_128_digest(content))
        return cls(np.array(sizes, np.int64), digests)


def divide_conversations(data: DataConfig, seed: int, say: Say) -> dict[str, tuple[str, Parts]]:
    """Return the source and the conversations of each split; all lines are read and checked.

    Args:
        say: told how many held-out conversations are trained on too, and how many are left out.
    """
    lines = _Lines.of(data.source, data)
    held_out = None if data.val_source is None else _Lines.of(data.val_source, data)
    sizes = _first_copies(lines, held_out, say) if data.drop_duplicates else lines.sizes
    count = int(np.count_nonzero(sizes))
    if held_out is None and count:
        parts = divide_whole(sizes, data.val_fraction, data.test_fraction, seed)
        if parts is not None:
            _say_leaks(parts, lines.digests, None, say)
            return {name: (data.source, rows) for name, rows in parts.items()}
    elif held_out is not None and data.val_source is not None and count:
        every = np.arange(held_out.sizes.size)
        parts = {
            "train": whole_documents(np.flatnonzero(sizes), sizes),
            "val": whole_documents(every, held_out.sizes),
        }
        _say_leaks(parts, lines.digests, held_out.digests, say)
        return {"train": (data.source, parts["train"]), "val": (data.val_source, parts["val"])}
    raise ConfigError.at(
        "data.val_source",
        f"{data.source}: {count} conversations, too few or too unequal to hold out whole ones",
        "give conversations to hold out in data.val_source, or other fractions",
    )


def _first_copies(lines: _Lines, held_out: _Lines | None, say: Say) -> Int64Array:
    """Return the sizes, 0 of conversations that are there before or held out."""
    earlier = set() if held_out is None else set(held_out.digests)
    sizes = lines.sizes.copy()
    for number, digest in enumerate(lines.digests):
        if digest in earlier:
            sizes[number] = 0
        earlier.add(digest)
    if count := int(np.count_nonzero(sizes == 0)):
        of = "" if held_out is None else " or held out"
        say(f"left out {count:,} of {sizes.size:,} conversations, which are there before{of}")
    return sizes


def _say_leaks(
    parts: Mapping[str, Parts], digests: list[bytes], held_out: list[bytes] | None, say: Say
) -> None:
    """Say how many held-out conversations are trained on too; `held_out`: of another source."""
    train_digests = {digests[number] for number in parts["train"][:, 0].tolist()}
    split_digests = digests if held_out is None else held_out
    for name, rows in parts.items():
        are_leaks = (split_digests[number] in train_digests for number in rows[:, 0].tolist())
        if name != "train" and (leaks := sum(are_leaks)):
            say(
                f"warning: {leaks:,} of {len(rows):,} conversations of {name} are trained on too, word for "
                "word; data.drop_duplicates: true takes each conversation once"
            )


@dataclass
class _Counts:
    """What became of the conversations, for a person."""

    read: int = 0
    split_up: int = 0
    """of which each answer is a sample"""
    samples: int = 0
    """those of these"""
    empty: int = 0
    """without anything to learn"""
    without_tools: int = 0
    """whose tools the template leaves out"""

    def remarks(self) -> Iterator[str]:
        if self.split_up:
            yield (
                f"{self.split_up:,} conversations became {self.samples:,}, one for each answer: the chat template "
                "renders an answer otherwise when others follow, and it is trained as it is generated"
            )
        if self.empty:
            yield f"{self.empty:,} of {self.read:,} conversations have nothing to learn and are left out"
        if self.without_tools:
            yield f"the chat template leaves out the tools of {self.without_tools:,} conversations"


def write_conversations(
    temporary: Path, data: DataConfig, seed: int, source: dict[str, Any], say: Say
) -> dict[str, int]:
    """Write a folder of prepared conversations; return the tokens of each split.

    Args:
        source: what it is made from, for its record.
        say: told what is not trained, or otherwise than it is written; see `divide_conversations`.

    Raises:
        ConfigError: a line is no conversation, or the template refuses it.
    """
    tokenizer = named_tokenizer(data.tokenizer)
    if not isinstance(tokenizer, BPETokenizer):
        raise ConfigError.of(
            f"data.kind chat needs a tokenizer.json, not {data.tokenizer}", key="data.tokenizer"
        )
    template = template_of(data, tokenizer)
    splits = divide_conversations(data, seed, say)
    record = TokenizerRecord(tokenizer.kind, tokenizer.fingerprint)
    (temporary / MARKS).mkdir()
    counts = _Counts()
    sizes = {temporary / MARKS: _MARK_VALUES, temporary: tokenizer.vocab_size}
    shards_of: dict[Path, dict[str, tuple[Shard, ...]]] = {folder: {} for folder in sizes}
    for name, (path, parts) in splits.items():
        marks_writer, tokens_writer = (
            ShardWriter(folder, name, tokenizer.fingerprint, size, _SHARD_TOKENS)
            for folder, size in sizes.items()
        )
        lines = enumerate(conversations(path, data))
        renderings = _render(path, lines, set(parts[:, 0].tolist()), template, counts)
        for tokens, marks in encode_renderings(renderings, tokenizer):
            tokens_writer.append(tokens)
            marks_writer.append(marks)
        shards_of[temporary / MARKS][name] = marks_writer.close()
        shards_of[temporary][name] = tokens_writer.close()
    for folder, shards in shards_of.items():
        for name, content in tokenizer_files(tokenizer).items():
            write_once(folder / name, content)
        write_record(
            folder, tokenizer=record, vocab_size=sizes[folder], splits=shards, source=source
        )
    for remark in filter(None, (template.remark, *counts.remarks())):
        say(f"note: {remark}")
    release()
    tokens_of = shards_of[temporary]
    return {name: sum(shard.count for shard in shards) for name, shards in tokens_of.items()}


def _render(
    source: str,
    lines: Iterable[tuple[int, tuple[int, Conversation]]],
    numbers: set[int],
    template: ChatTemplate,
    counts: _Counts,
) -> Iterator[Rendering]:
    """Yield the texts of the conversations with these numbers that have something to learn."""
    for number, (_, conversation) in lines:
        if number not in numbers:
            continue
        messages, options = conversation.messages, conversation.options
        try:
            if "tool_calls" not in template.text and any(m.get("tool_calls") for m in messages):
                raise ValueError("the chat template leaves out its `tool_calls`")
            renderings = template.renderings(messages, options)
        except (ValueError, ImportError) as error:
            where = f"{source}: conversation {number + 1}"
            raise ConfigError.of(str(error), where=where, key="data.source") from None
        used = [text for text in renderings if any(begin < end for begin, end in text.spans)]
        counts.read += 1
        counts.empty += not used
        counts.without_tools += "tools" in options and "tools" not in template.text
        if len(renderings) > 1:
            counts.split_up += 1
            counts.samples += len(used)
        yield from used


def encode_renderings(
    renderings: Iterator[Rendering], tokenizer: BPETokenizer
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield tokens and marks. Special tokens in a conversation's text are those of the template: transformers does
    not tell them apart either."""
    while batch := list(islice(renderings, _BATCH)):
        encodings = tokenizer.engine.parse([rendering.text for rendering in batch])
        for (ids, places), rendering in zip(encodings, batch, strict=True):
            yield ids, _marks(places, rendering)


def _marks(places: Places, rendering: Rendering) -> NDArray[np.uint8]:
    """Return the marks of tokens at these places in the text: what overlaps a span is a target.

    As in transformers, a span of `{% generation %}` ends with the first token of its last character, even if that
    has several.
    """
    marks = np.zeros(len(places), np.uint8)
    begins, ends = places.T
    for begin, end in rendering.spans:
        tokens = np.flatnonzero((ends > begin) & (begins < end) & (ends > begins))
        if tokens.size:
            of_last_character = tokens[ends[tokens] >= end]
            cut = rendering.of_template and of_last_character.size
            last = of_last_character[0] if cut else tokens[-1]
            marks[tokens[0] : last + 1] = TARGET
    marks[:1] |= BEGINS
    return marks


def conversation_sizes(marks: TokenSequence) -> Int64Array:
    """Return the tokens of each conversation, int64 [conversations]."""
    begins = np.flatnonzero(marks.read(0, len(marks)) & BEGINS).astype(np.int64)
    return np.diff(begins, append=len(marks))


def _shortest_context(every: NDArray[Any]) -> str:
    """Return which context has the first token of an answer, of conversations one by one."""
    answers = np.flatnonzero(every & TARGET)
    begins = np.maximum.accumulate(np.where(every & BEGINS, np.arange(len(every)), 0))
    lengths = answers - begins[answers]
    return f"the shortest that has one is {int(lengths.min()):,}" if lengths.size else ""


class ChatSamples:
    """A source of `context` tokens per sample, whose targets are the assistant's; other targets are -1.

    Packed, samples are windows over conversations end to end; else, a sample is one conversation, cut off after
    the context. What has no target is no sample. `remark` says in words what is lost by that.
    """

    def __init__(
        self,
        tokens: TokenSequence,
        marks: TokenSequence,
        context: int,
        *,
        packing: bool,
        separate: bool = False,
    ) -> None:
        """`separate`: conversations of a window do not see each other: `positions`, int64 [samples, context], begin anew."""
        self._tokens, self._marks, self.context = tokens, marks, context
        self._separate = separate
        every = marks.read(0, len(marks))
        if separate:
            every = np.where(every & BEGINS, every & ~np.uint16(TARGET), every)
        if packing:
            begins = np.arange(0, len(every) - 1, context, dtype=np.int64)
            ends = np.minimum(begins + context + 1, len(every))
        else:
            begins = np.flatnonzero(every & BEGINS).astype(np.int64)
            whole_ends = np.append(begins[1:], len(every))
            ends = np.minimum(whole_ends, begins + context + 1)
        targets = np.concatenate([[0], np.cumsum(every & TARGET, dtype=np.int64)])
        counts: Int64Array = targets[ends] - targets[np.minimum(begins + 1, ends)]
        used = counts > 0
        self.remark = ""
        if not packing and (targets[whole_ends] > targets[ends]).any():
            cut_targets = targets[whole_ends] - targets[ends]
            self.remark = (
                f"{tokens.name}: {(~used).sum():,} of {used.size:,} conversations have no answer within the context "
                f"of {context:,} tokens and are left out, {((cut_targets > 0) & used).sum():,} are cut off in one: "
                f"{cut_targets.sum():,} of {targets[-1]:,} target tokens are lost"
            )
        self._begins, self._ends, self._counts = begins[used], ends[used], counts[used]
        if not used.any():
            raise ConfigError.at(
                "model.context",
                f"no sample of the {tokens.name} split has a token of the assistant within {context:,} tokens",
                "a longer context" if packing else _shortest_context(every),
            )
        how = ("separate" if separate else "packed") if packing else "one"
        self.fingerprint = f"{tokens.fingerprint}/{marks.fingerprint}/{how}/{context}"

    def __len__(self) -> int:
        return self._begins.size

    def weights(self, indices: Int64Array) -> float:
        """Return the number of targets in the samples."""
        return float(self._counts[indices].sum())

    def read(self, indices: Int64Array, epoch: int = 0) -> dict[str, Column]:  # noqa: ARG002
        """Return `inputs` and `targets`, int64 [len(indices), context], contiguous, and what tells documents apart.

        Raises IndexError outside 0 … len-1.
        """
        check_indices(indices, len(self))
        inputs = np.zeros((indices.size, self.context), dtype=np.int64)
        targets = np.full_like(inputs, IGNORED)
        ends = np.zeros(inputs.shape, dtype=np.bool_)
        places = zip(self._begins[indices].tolist(), self._ends[indices].tolist(), strict=True)
        for row, (begin, end) in enumerate(places):
            tokens, marks = self._tokens.read(begin, end), self._marks.read(begin, end)
            size = end - begin - 1
            inputs[row, :size] = tokens[:-1]
            targets[row, :size] = np.where(marks[1:] & TARGET, tokens[1:].astype(np.int64), IGNORED)
            ends[row, :size] = (marks[1:] & BEGINS) != 0
        if not self._separate:
            return {"inputs": inputs, "targets": targets}
        targets[ends] = IGNORED
        return {"inputs": inputs, "targets": targets, **documents_between(ends)}
