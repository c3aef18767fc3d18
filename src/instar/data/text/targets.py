"""The targets of text samples, by which losses are means: checked, counted before a run begins, and their bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instar.data.columns import Column, Columns, Ragged
from instar.data.order import Int64Array
from instar.data.source import (
    IGNORED,
    Measure,
    Source,
    TokenWindows,
    WrappedSource,
    measure_of,
)
from instar.data.text.tokenizer import BPETokenizer, CharTokenizer, Tokenizer

_COUNTED = 1 << 20
_READ, _AT_ONCE = 256, 16


@dataclass(frozen=True)
class TokenTargets:
    """`Measure` of samples of `context` tokens out of a vocabulary: their weight is the number of targets."""

    context: int
    vocab_size: int

    def check(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the sample with its `inputs` and `targets` as int64. Raises ValueError unless these are integers
        [context] of the vocabulary; a target may be IGNORED."""
        tokens = {}
        for name, lowest in (("inputs", 0), ("targets", IGNORED)):
            if name not in sample:
                raise ValueError(f"there are no {name}")
            array = np.asarray(sample[name])
            if array.dtype.kind not in "iu" or array.shape != (self.context,):
                raise ValueError(
                    f"{name} are {array.dtype}{list(array.shape)}, not integers [{self.context}]; fill up "
                    f"inputs with any token, and targets with {IGNORED}, which is no target"
                )
            low, high = int(array.min()), int(array.max())
            if low < lowest or high >= self.vocab_size:
                wrong = low if low < lowest else high
                no_target = f", and {IGNORED} is no target" if name == "targets" else ""
                raise ValueError(
                    f"{name} have {wrong}; tokens are 0 to {self.vocab_size - 1}{no_target}"
                )
            tokens[name] = array.astype(np.int64, copy=False)
        return {**sample, **tokens}

    def weights(self, columns: Columns) -> NDArray[np.float64]:
        """Return the targets of each sample, [samples]."""
        counts: NDArray[np.intp] = np.count_nonzero(columns["targets"] != IGNORED, axis=1)
        return counts.astype(np.float64)


@dataclass(frozen=True)
class DocumentEdge:
    """The token by which documents that lie end to end are told apart."""

    token: int
    begins: bool = False
    """whether it begins a document, as in the files of llm.c; else it ends one"""


@dataclass(frozen=True, eq=False)
class SeparateDocuments(WrappedSource):
    """Windows of text in which documents do not see each other.

    `positions` and `documents` are those of `documents_between`. The first token of a document is no target, since the
    token before it is another document's.

    Args:
        edges: of each text, of which a mixture has several.
        offsets: the first sample of each text.
    """

    source: Source
    edges: Sequence[DocumentEdge]
    targets: TokenTargets
    offsets: Sequence[int] = (0,)

    @property
    def fingerprint(self) -> str:
        edges = [f"{'begin' if edge.begins else 'end'}/{edge.token}" for edge in self.edges]
        # texts of one form are told apart in one way
        text = "/".join(edges if len(set(edges)) > 1 else edges[:1])
        return f"{self.source.fingerprint}/documents/{text}"

    @property
    def measure(self) -> Measure:
        return self.targets

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        columns = self.source.read(indices, epoch)
        inputs, targets = (np.asarray(columns[name]) for name in ("inputs", "targets"))
        # indices may count draws of the samples, see `Mixed`
        texts = np.searchsorted(self.offsets, indices % len(self), side="right") - 1
        tokens = np.array([edge.token for edge in self.edges])[texts, None]
        begins = np.array([edge.begins for edge in self.edges])[texts, None]
        ends = np.where(begins, targets, inputs) == tokens
        return {
            **columns,
            "targets": np.where(ends, IGNORED, targets),
            **documents_between(ends),
        }

    def weights(self, indices: Int64Array) -> float:
        """Return the number of targets in the samples, which are read for it."""
        return float(self.targets.weights(self.read(indices)).sum())


def documents_between(ends: NDArray[np.bool_]) -> dict[str, Column]:
    """Return `positions`, int64 [samples, tokens], of each token in its document, and `documents`, int64, how many tokens
    each document of a sample has.

    Args:
        ends: whether a token is the last of its document, [samples, tokens]. The last of a sample always is.
    """
    begins = np.ones_like(ends)
    begins[:, 1:] = ends[:, :-1]
    places = np.arange(ends.shape[1], dtype=np.int64)
    first = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    sizes = np.diff(np.flatnonzero(begins), append=begins.size).astype(np.int64)
    offsets = np.concatenate(([0], begins.sum(1).cumsum())).astype(np.int64)
    return {"positions": places - first, "documents": Ragged(sizes, offsets)}


@dataclass(frozen=True)
class TargetCount:
    """The mean number of targets of a training sample, and what is to be said of that number."""

    mean: float
    remark: str = ""


def count_targets(source: Source, context: int) -> TargetCount:
    """Return the targets of a source's samples: counted, or, where what is read decides, of samples that are read.

    Raises what reading a sample raises.
    """
    measure, size = measure_of(source), len(source)
    if measure is None:
        if isinstance(source, TokenWindows):
            return TargetCount(context)
        numbers = np.linspace(0, size - 1, min(size, _COUNTED)).astype(np.int64)
        return TargetCount(source.weights(numbers) / numbers.size)
    numbers = np.linspace(0, size - 1, min(size, _READ)).astype(np.int64)
    batches = (numbers[begin : begin + _AT_ONCE] for begin in range(0, numbers.size, _AT_ONCE))
    total = sum(float(measure.weights(source.read(batch)).sum()) for batch in batches)
    of = "all" if numbers.size == size else f"{numbers.size:,} of the {size:,}"
    key = "document_masks" if isinstance(source, SeparateDocuments) else "transform"
    remark = f"targets that data.{key} leaves in {of} training samples"
    return TargetCount(total / numbers.size, remark)


def mean_target_count(counts: Sequence[TargetCount], shares: Sequence[float]) -> TargetCount:
    """Return the mean over the parts of a mixture, by their shares of the samples."""
    mean = sum(part.mean * share for part, share in zip(counts, shares, strict=True)) / sum(shares)
    remarks = dict.fromkeys(part.remark for part in counts if part.remark)
    return TargetCount(mean, "; ".join(remarks))


def at_most(context: int, why: str) -> TargetCount:
    """Return the count of samples whose targets are not known yet."""
    return TargetCount(context, f"an upper bound: {why}")


def token_bytes(tokenizer: Tokenizer) -> NDArray[np.int64] | None:
    """Return how many bytes of UTF-8 text each token stands for, [vocab_size]; None if unknown.

    They are known of bytes, of characters (one that the tokenizer does not know counts as 1), and
    of byte-level BPE, whose special tokens such as the end of a document stand for none.
    """
    if isinstance(tokenizer, CharTokenizer):
        texts = [*tokenizer.characters, *([] if tokenizer.closed else "?")]
        return np.array([len(text.encode()) for text in texts], dtype=np.int64)
    if not isinstance(tokenizer, BPETokenizer):
        return np.ones(tokenizer.vocab_size, dtype=np.int64)
    content = json.loads(tokenizer.to_json())
    decoder = content.get("decoder") or {}
    if (content["model"].get("type"), decoder.get("type")) != ("BPE", "ByteLevel"):
        return None
    added_tokens = {token["content"]: token for token in content.get("added_tokens", ())}
    sizes = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for token, number in tokenizer.vocabulary.items():
        # in byte-level BPE, each character of a token is a byte; added tokens are literal text
        size = len(token) if token not in added_tokens else len(token.encode())
        sizes[number] = 0 if added_tokens.get(token, {}).get("special") else size
    return sizes
