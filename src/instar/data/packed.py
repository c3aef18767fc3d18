"""Chosen documents as training data: end to end, or each as a sample of its own."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.data.documents import Documents, Stretches
from instar.data.order import Int64Array
from instar.data.source import IGNORED


class PackedSplit:
    """Chosen documents end to end as one flat sequence of tokens, a separator between two.

    The tokens are those that token shards of the same documents hold.
    """

    def __init__(
        self, name: str, documents: Documents, chosen: Int64Array, counts: Int64Array
    ) -> None:
        """`chosen` are documents in the order in which they follow each other, `counts` the tokens
        of each with the separator after it; both [n]."""
        self.name = name
        self.documents, self.chosen = documents, chosen
        sizes = counts.copy()
        sizes[-1:] -= documents.separator.size  # none stands after the last document
        sources, begins = documents.locate(chosen)
        heads = _heads_of_runs(sources, begins, sizes)
        # runs of documents that lie end to end: run k is tokens offsets[k] … offsets[k+1]-1 here
        self._sources, self._begins = sources[heads], begins[heads]
        self._offsets = np.zeros(heads.size + 1, dtype=np.int64)
        np.cumsum(np.add.reduceat(sizes, heads) if heads.size else sizes, out=self._offsets[1:])

    def __len__(self) -> int:
        return int(self._offsets[-1])

    @cached_property
    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(
            self.documents.fingerprint.encode() + self.chosen.tobytes()
        )

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start … stop-1, copied. Raises IndexError outside the split."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start}..{stop} of {self.name}, which has {len(self)}")
        tokens: NDArray[Any] = self.windows(np.array([start], dtype=np.int64), stop - start)[0]
        return tokens

    def windows(self, starts: Int64Array, length: int) -> NDArray[Any]:
        """Tokens start … start+length-1 for each start, [len(starts), length].

        Each text is tokenised once. Raises IndexError where a window leaves the split.
        """
        tokens: NDArray[Any] = np.empty((starts.size, length), dtype=self.documents.dtype)
        if not tokens.size:
            return tokens
        ends = starts + length
        if starts.min() < 0 or ends.max() > len(self):
            raise IndexError(f"a window of {length} tokens leaves {self.name} ({len(self)} tokens)")
        firsts = self._offsets.searchsorted(starts, side="right") - 1
        lasts = self._offsets.searchsorted(ends, side="left") - 1
        runs_each = lasts - firsts + 1
        window = np.repeat(np.arange(starts.size), runs_each)
        before = np.cumsum(runs_each) - runs_each
        run = np.arange(window.size) + np.repeat(firsts - before, runs_each)
        first_tokens = self._offsets[run]
        begins = np.maximum(first_tokens, starts[window])
        stretches = Stretches(
            sources=self._sources[run],
            begins=self._begins[run] + begins - first_tokens,
            sizes=np.minimum(self._offsets[run + 1], ends[window]) - begins,
            places=window * length + begins - starts[window],
        )
        self.documents.copy(stretches, tokens.reshape(-1))
        return tokens


def _heads_of_runs(sources: Int64Array, begins: Int64Array, sizes: Int64Array) -> Int64Array:
    """Which stretches do not go on where the one before ends in the same source."""
    is_head = np.ones(sizes.size, dtype=bool)
    is_head[1:] = sources[1:] != sources[:-1]
    is_head[1:] |= begins[1:] != begins[:-1] + sizes[:-1]
    return np.flatnonzero(is_head)


class DocumentSamples:
    """A source whose samples are documents, cut off after context + 1 tokens.

    What a document lacks is input 0 and target -1. The separator that follows a document belongs
    to it. Documents of fewer than two tokens have nothing to predict and are no samples.
    """

    def __init__(
        self, documents: Documents, chosen: Int64Array, counts: Int64Array, context: int
    ) -> None:
        """`counts` are the tokens of the chosen documents, separators included; both [n]."""
        usable = counts >= 2
        self.documents, self.context = documents, context
        self._chosen = chosen[usable]
        self._sources, self._begins = documents.locate(self._chosen)
        self._sizes: Int64Array = np.minimum(counts[usable], context + 1)

    def __len__(self) -> int:
        return self._chosen.size

    @cached_property
    def fingerprint(self) -> str:
        chosen = xxhash.xxh3_128_hexdigest(self._chosen.tobytes())
        return f"{self.documents.fingerprint}/{chosen}/document/{self.context}"

    def weights(self, indices: Int64Array) -> float:
        """How many targets the samples have."""
        return float(self._sizes[indices].sum() - indices.size)

    def read(self, indices: Int64Array, epoch: int = 0) -> dict[str, NDArray[Any]]:  # noqa: ARG002
        """`inputs` and `targets`, int64 [len(indices), context], contiguous.

        Raises IndexError outside 0 … len-1.
        """
        if indices.size and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"samples {indices.min()}..{indices.max()} of {len(self)}")
        sizes, width = self._sizes[indices], self.context + 1
        tokens = np.zeros((indices.size, width), dtype=self.documents.dtype)
        stretches = Stretches(
            sources=self._sources[indices],
            begins=self._begins[indices],
            sizes=sizes,
            places=np.arange(indices.size) * width,
        )
        self.documents.copy(stretches, tokens.reshape(-1))
        has_target = np.arange(self.context) < (sizes - 1)[:, None]
        return {
            "inputs": np.where(has_target, tokens[:, :-1], 0).astype(np.int64, copy=False),
            "targets": np.where(has_target, tokens[:, 1:].astype(np.int64), IGNORED),
        }
