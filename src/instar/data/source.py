"""Where samples are: anything that reads samples by index, and windows over tokens."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from instar.config.errors import ConfigError
from instar.data.columns import Columns
from instar.data.order import Int64Array
from instar.data.shards import TokenArray

IGNORED = -1
"""The target of a position that has none."""


class Source(Protocol):
    """Samples by index; reading the same index twice gives the same sample."""

    @property
    def fingerprint(self) -> str:
        """Equal for two sources exactly if they hold the same samples."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        """Columns with the samples in the order of `indices`.

        Args:
            epoch: counts passes through the data; only a source that draws something of its own for
                every sample asks for it.
        """
        ...

    def weights(self, indices: Int64Array) -> float:
        """The sum of the samples' loss weights, without reading them."""
        ...


@runtime_checkable
class Closable(Protocol):
    """A source that holds processes or files."""

    def close(self) -> None: ...


def close(source: Source) -> None:
    """Let a source give back what it holds."""
    if isinstance(source, Closable):
        source.close()


class TokenSequence(Protocol):
    """One split as one flat sequence of tokens, wherever they are."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> TokenArray:
        """Tokens start … stop-1, copied. Raises IndexError outside the split."""
        ...

    def windows(self, starts: Int64Array, length: int) -> TokenArray:
        """Tokens start … start+length-1 for each start, [len(starts), length].

        Raises IndexError where a window leaves the split.
        """
        ...


def windows_of(tokens: int, context: int) -> int:
    """Windows of `context` tokens, end to end, whose targets are all of a text's but the first."""
    return max(1, -(-(tokens - 1) // context))


class TokenWindows:
    """Windows of `context` tokens, each with the tokens one further on as its targets.

    Without a stride, windows lie end to end and the last may be ragged, so that every token but
    the first is a target exactly once; what the last lacks is input 0 and target -1. With a
    stride, only full windows count, one at every stride-th token.

    Raises ConfigError where the split is too short: train and strided windows need context + 1
    tokens, held-out splits 2.
    """

    def __init__(self, split: TokenSequence, context: int, stride: int | None = None) -> None:
        needed = context + 1 if split.name == "train" or stride is not None else 2
        if len(split) < needed:
            raise ConfigError.one(
                f"the {split.name} split has {len(split):,} tokens, fewer than the {needed:,} "
                f"that a context of {context:,} needs",
                where="model.context",
                hint="a shorter context or more text",
                key="model.context",
            )
        self.split = split
        self.context = context
        self.stride = context if stride is None else stride
        self.fingerprint = f"{split.fingerprint}/{context}/{self.stride}"
        if stride is None:
            self._length = -(-(len(split) - 1) // context)
        else:
            self._length = (len(split) - context - 1) // stride + 1
        last_targets = min(context, len(split) - 1 - (self._length - 1) * self.stride)
        self._missing_in_last = context - last_targets

    def __len__(self) -> int:
        return self._length

    def weights(self, indices: Int64Array) -> float:
        """How many targets the windows have."""
        missing = 0
        if self._missing_in_last:
            last = int(np.count_nonzero(indices == self._length - 1))
            missing = self._missing_in_last * last
        return float(indices.size * self.context - missing)

    def read(self, indices: Int64Array, epoch: int = 0) -> dict[str, NDArray[Any]]:  # noqa: ARG002
        """`inputs` and `targets`, int64 [len(indices), context], contiguous.

        Raises IndexError outside 0 … len-1.
        """
        if indices.size and (indices.min() < 0 or indices.max() >= self._length):
            raise IndexError(f"samples {indices.min()}..{indices.max()} of {self._length}")
        inputs = np.empty((indices.size, self.context), dtype=np.int64)
        targets = np.empty_like(inputs)
        ragged = np.flatnonzero(indices == self._length - 1) if self._missing_in_last else ()
        whole = np.flatnonzero(indices != self._length - 1) if len(ragged) else slice(None)
        tokens = self.split.windows(indices[whole] * self.stride, self.context + 1)
        inputs[whole], targets[whole] = tokens[:, :-1], tokens[:, 1:]
        if len(ragged):
            tail = self.split.read((self._length - 1) * self.stride, len(self.split))
            inputs[ragged], targets[ragged] = 0, IGNORED
            inputs[ragged, : tail.size - 1] = tail[:-1]
            targets[ragged, : tail.size - 1] = tail[1:]
        return {"inputs": inputs, "targets": targets}
