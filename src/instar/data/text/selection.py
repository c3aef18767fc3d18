"""The text that is trained on: all of the training split, or the part of it that `data.train_subset` says.

Whole documents of rows and whole conversations are chosen. Token shards do not say where documents begin: of them,
stretches of some thousand tokens are chosen, which lie end to end as documents do. What is chosen does not depend on
the context, so that a run whose context grows stays within its text.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.config.language import DataConfig
from instar.data.order import Int64Array, Shuffled
from instar.data.source import TokenArray, TokenSequence
from instar.data.split import subset_count, subset_of, subset_remark, subset_seed

_STRETCHES = 256
"""into which a split is cut, unless they would be shorter or longer than these:"""
_SHORTEST, _LONGEST = 1 << 12, 1 << 20


@dataclass(frozen=True)
class TrainingText:
    """Tokens to train on, and the sizes of their documents where these are known."""

    split: TokenSequence
    document_sizes: Int64Array | None = None
    remark: str = ""
    """what was chosen of the training split; empty: all"""


def training_text(
    split: TokenSequence,
    document_sizes: Int64Array | None,
    data: DataConfig,
    seed: int,
    unit: str = "documents",
) -> TrainingText:
    """Return what the config trains on of a training split.

    Args:
        document_sizes: tokens of each document, as in `TokenDataset`; None: not known.
        seed: of the data.
        unit: what documents are called, in the plural.

    Raises:
        ConfigError: there is not as much, or a share of it is nothing.
    """
    size = data.train_subset
    if size is None:
        return TrainingText(split, document_sizes)
    if document_sizes is None:
        count = subset_count(size, len(split), "tokens")
        chosen = SelectedTokens.of(split, *_stretches(len(split), count, seed))
        return TrainingText(chosen, None, subset_remark(size, count, len(split), "tokens"))
    numbers = subset_of(document_sizes.size, size, seed, unit)
    ends = np.cumsum(document_sizes)
    # the split lacks the separator after its last document
    begins, ends = ends - document_sizes, np.minimum(ends, len(split))
    chosen = SelectedTokens.of(split, begins[numbers], ends[numbers])
    remark = subset_remark(size, numbers.size, document_sizes.size, unit)
    return TrainingText(chosen, document_sizes[numbers], remark)


def _stretches(tokens: int, count: int, seed: int) -> tuple[Int64Array, Int64Array]:
    """Return the begins and ends, ascending, of stretches that have `count` tokens together."""
    size = min(max(tokens // _STRETCHES, _SHORTEST), _LONGEST)
    begins = np.arange(0, tokens, size, dtype=np.int64)
    order = Shuffled(begins.size, subset_seed(seed)).indices(0, 0, begins.size)
    sizes = np.minimum(tokens - begins, size)[order]
    before = np.cumsum(sizes) - sizes
    chosen_sizes = np.empty_like(sizes)
    chosen_sizes[order] = np.clip(count - before, 0, sizes)
    return begins, begins + chosen_sizes


@dataclass(frozen=True, eq=False)
class SelectedTokens:
    """Stretches of a token sequence, end to end: stretch k has tokens offsets[k] … offsets[k + 1] - 1."""

    tokens: TokenSequence
    begins: Int64Array
    """of each stretch, in `tokens`"""
    offsets: Int64Array

    @classmethod
    def of(cls, tokens: TokenSequence, begins: Int64Array, ends: Int64Array) -> SelectedTokens:
        """Return the tokens begins[k] … ends[k] - 1 for each k; those are ascending, and may be none."""
        used = ends > begins
        begins, ends = begins[used], ends[used]
        parted = begins[1:] != ends[:-1]
        begins = begins[np.append(True, parted)[: begins.size]]
        ends = ends[np.append(parted, True)[: ends.size]]
        return cls(tokens, begins, np.append(0, np.cumsum(ends - begins)).astype(np.int64))

    @property
    def name(self) -> str:
        return self.tokens.name

    @property
    def fingerprint(self) -> str:
        stretches = np.concatenate([self.begins, self.offsets]).astype("<i8")
        return f"{self.tokens.fingerprint}/{xxhash.xxh3_128_hexdigest(stretches.tobytes())}"

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def read(self, start: int, stop: int) -> TokenArray:
        """See `TokenSequence`."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(
                f"tokens {start}..{stop} of {self.name}, of which {len(self)} are used"
            )
        first, last = np.searchsorted(self.offsets, (start, max(start, stop - 1)), side="right") - 1
        edges = [start, *self.offsets[first + 1 : last + 1].tolist(), stop]
        # none behind the last token, where there is nothing to read
        shifts = (self.begins - self.offsets[:-1])[first : last + 1].tolist() or [0]
        parts: list[NDArray[Any]] = [
            self.tokens.read(begin + shift, end + shift)
            for (begin, end), shift in zip(pairwise(edges), shifts, strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def windows(self, starts: Int64Array, length: int) -> TokenArray:
        """See `TokenSequence`."""
        if starts.size and not 0 <= starts.min() <= starts.max() <= len(self) - length:
            raise IndexError(f"a window of {length} tokens leaves {self.name} ({len(self)} tokens)")
        stretches = np.searchsorted(self.offsets, starts, side="right") - 1
        is_inside = starts + length <= self.offsets[stretches + 1]
        shifts = self.begins[stretches] - self.offsets[stretches]
        if is_inside.all():
            return self.tokens.windows(starts + shifts, length)
        inside = self.tokens.windows((starts + shifts)[is_inside], length)
        windows: NDArray[np.uint16] | NDArray[np.uint32] = np.empty(
            (starts.size, length), inside.dtype
        )
        windows[is_inside] = inside
        for row in np.flatnonzero(~is_inside).tolist():
            windows[row] = self.read(int(starts[row]), int(starts[row]) + length)
        return windows
