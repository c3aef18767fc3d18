"""A function of the user's, applied to every sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from instar.config.named import load_named
from instar.config.schema import FeedConfig
from instar.data.columns import Column, Columns, Ragged, stack
from instar.data.order import Int64Array, key_bytes
from instar.data.source import Source, close

Sample: TypeAlias = "Mapping[str, Any]"
"""One sample: arrays by name, nested as the columns are."""

SampleFunction: TypeAlias = "Callable[[dict[str, Any], np.random.Generator], Sample]"


def sample_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The generator of one sample in one epoch, the same wherever it is read."""
    words: Any = _Words(np.frombuffer(key_bytes(f"sample/{index}", seed, epoch, 32), dtype="<u8"))
    return np.random.Generator(np.random.PCG64(words))


class Transformed:
    """What a function makes of the samples of a source; their weights are the source's.

    The function must make the same of the same sample and generator, so that a sample can be read
    again. It gets arrays of its own and may write to them.
    """

    def __init__(self, source: Source, function: SampleFunction, seed: int) -> None:
        self.source = source
        self._function = function
        self._seed = seed
        self._name = getattr(function, "__qualname__", type(function).__qualname__)
        self.fingerprint = f"{source.fingerprint}/{function.__module__}:{self._name}/{seed}"

    def __len__(self) -> int:
        return len(self.source)

    def weights(self, indices: Int64Array) -> float:
        return self.source.weights(indices)

    def close(self) -> None:
        close(self.source)

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        """The transformed samples.

        What the function raises is raised with a note of the sample.

        Raises:
            ValueError: what the function made of a sample, named by its index, is no mapping of
                numbers, or another one than for the first sample.
        """
        columns = self.source.read(indices, epoch)
        numbers = indices.tolist()
        samples = []
        for row, index in enumerate(numbers):
            try:
                generator = sample_generator(self._seed, epoch, index)
                samples.append(self._function(_sample(columns, row), generator))
            except Exception as error:
                error.add_note(f"in {self._name}, of sample {index} in epoch {epoch}")
                raise
        try:
            return stack(samples, numbers)
        except ValueError as error:
            raise ValueError(f"{self._name} made samples that do not fit: {error}") from None


def transformed(source: Source, data: FeedConfig, seed: int) -> Source:
    """The source, with the user's function applied to its samples if there is one."""
    if data.transform is None:
        return source
    return Transformed(source, load_named(data.transform, key="data.transform"), seed)


class _Words(np.random.bit_generator.ISeedSequence):
    """Seeds a generator with words that are random already, which is much cheaper than mixing."""

    def __init__(self, words: np.ndarray[Any, Any]) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return self._words[:n_words].astype(dtype)


def _sample(columns: Columns, row: int) -> dict[str, Any]:
    return {name: _value(column, row) for name, column in columns.items()}


def _value(column: Column, row: int) -> Any:
    if isinstance(column, Mapping):
        return _sample(column, row)
    if isinstance(column, Ragged):
        return column.values[column.offsets[row] : column.offsets[row + 1]]
    return column[row]
