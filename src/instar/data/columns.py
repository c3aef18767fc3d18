"""Batches of samples as named columns: dense or ragged numpy arrays, optionally nested.

The first axis of a column is the samples. Slices are views. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from instar.data.order import Int64Array

NUMBERS = "biufc"
"""The numpy dtype kinds that a column may have: booleans and numbers."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """A ragged array: sample i is values[offsets[i] : offsets[i + 1]].

    `values` is [total, ...]; `offsets` is int64 [samples + 1] and may start anywhere in `values`.
    """

    values: NDArray[Any]
    offsets: Int64Array

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, samples: slice) -> Ragged:
        begin, end, _ = samples.indices(len(self))
        return Ragged(self.values, self.offsets[begin : max(begin, end) + 1])

    @property
    def sizes(self) -> Int64Array:
        """The length of each sample's array, int64 [samples]."""
        sizes: Int64Array = np.diff(self.offsets)
        return sizes

    @property
    def flat(self) -> NDArray[Any]:
        """The concatenated arrays of the samples."""
        flat: NDArray[Any] = self.values[self.offsets[0] : self.offsets[-1]]
        return flat

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes + self.offsets.nbytes


Column: TypeAlias = "NDArray[Any] | Ragged | Columns"
Columns: TypeAlias = Mapping[str, Column]


def leaves(columns: Columns, path: str = "") -> Iterator[tuple[str, NDArray[Any] | Ragged]]:
    """Yield every array with its name; names of nested columns are joined by dots."""
    for name, column in columns.items():
        if isinstance(column, Mapping):
            yield from leaves(column, f"{path}{name}.")
        else:
            yield f"{path}{name}", column


def map_columns(
    columns: Columns, do: Callable[[NDArray[Any] | Ragged], NDArray[Any] | Ragged]
) -> dict[str, Column]:
    """Apply a function to every array."""
    return {
        name: map_columns(column, do) if isinstance(column, Mapping) else do(column)
        for name, column in columns.items()
    }


def cut(columns: Columns, begin: int, end: int) -> dict[str, Column]:
    """Return samples begin … end-1, as views."""
    return map_columns(columns, lambda column: column[begin:end])


def nbytes(columns: Columns) -> int:
    return sum(column.nbytes for _, column in leaves(columns))


def ragged_names(columns: Columns) -> frozenset[str]:
    """Return the names of the ragged columns; see `leaves`."""
    return frozenset(name for name, column in leaves(columns) if isinstance(column, Ragged))


def stack(
    samples: Sequence[Any],
    numbers: Sequence[int] | None = None,
    ragged: Collection[str] | None = None,
) -> dict[str, Column]:
    """Stack samples into columns.

    Args:
        numbers: the numbers of the samples in error messages; default: their positions.
        ragged: names of the columns that are ragged, see `leaves`; scalars are dense. None: those whose samples
            have several sizes, which is for all samples of a source at once: some of them may be of one size.

    Raises:
        ValueError: a sample, given by its number, has other keys, dtypes or trailing axes than the
            first, another size where the column is not ragged, or a value that is not an array of numbers.
    """
    if not samples:
        raise ValueError("there are no samples to stack")
    numbers = range(len(samples)) if numbers is None else numbers
    first = samples[0]
    for number, sample in zip(numbers, samples, strict=True):
        if not isinstance(sample, Mapping):
            kind = type(sample).__name__
            raise ValueError(f"sample {number} is a {kind}, where named arrays are expected")
        if sample.keys() != first.keys():
            raise ValueError(
                f"sample {number} has {', '.join(map(str, sample)) or 'nothing'}, "
                f"the first one {', '.join(map(str, first)) or 'nothing'}"
            )
    columns = {str(name): [sample[name] for sample in samples] for name in first}
    stacked = {name: _column(name, values, numbers) for name, values in columns.items()}
    if ragged is None:
        return stacked
    for name, column in leaves(stacked):
        if isinstance(column, Ragged) and name not in ragged:
            odd = int(np.argmax(column.sizes != column.sizes[0]))
            raise ValueError(
                f"sample {numbers[odd]}: {name} has {column.sizes[odd]} rows, sample {numbers[0]} has "
                f"{column.sizes[0]}; those looked at first had one size, so this is no ragged column: pad all "
                "samples to one size, or begin with one of another size"
            )
    return make_ragged(stacked, ragged)


def make_ragged(columns: Columns, names: Collection[str], path: str = "") -> dict[str, Column]:
    """Return columns of which those with these names, see `leaves`, are ragged; scalars stay as they are."""
    return {
        name: make_ragged(column, names, f"{path}{name}.")
        if isinstance(column, Mapping)
        else as_ragged(column)
        if f"{path}{name}" in names and not (isinstance(column, np.ndarray) and column.ndim == 1)
        else column
        for name, column in columns.items()
    }


def difference(first: Columns, other: Columns) -> str:
    """Return why two batches cannot be joined, e.g. "x as int64[*], not float32[*, 3]", or "".

    A star is a sample's first axis, which may have any size.
    """
    other_columns, first_columns = dict(leaves(other)), dict(leaves(first))
    if other_columns.keys() != first_columns.keys():
        names, others = ", ".join(first_columns), ", ".join(other_columns)
        return f"{others or 'nothing'}, not {names or 'nothing'}"
    for name, column in other_columns.items():
        if _kind(column) != _kind(first_columns[name]):
            return f"{name} as {_kind(column)}, not {_kind(first_columns[name])}"
    return ""


def join_columns(parts: Sequence[Columns]) -> dict[str, Column]:
    """Concatenate batches.

    Raises:
        ValueError: a part, given by its position, has other columns than the first.
    """
    for number, part in enumerate(parts):
        if mismatch := difference(parts[0], part):
            raise ValueError(f"part {number} has {mismatch}")
    return _join(parts)


def pick(columns: Columns, samples: Int64Array) -> dict[str, Column]:
    """Return copies of the given samples, in the given order."""
    return map_columns(columns, lambda column: _pick_column(column, samples))


def _pick_column(column: NDArray[Any] | Ragged, samples: Int64Array) -> NDArray[Any] | Ragged:
    if not isinstance(column, Ragged):
        return column[samples]
    sizes = column.sizes[samples]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    # the index into the old values of each value of the result
    shift = np.repeat(column.offsets[samples] - offsets[:-1], sizes)
    return Ragged(column.values[np.arange(offsets[-1]) + shift], offsets)


def _kind(column: NDArray[Any] | Ragged) -> str:
    """Describe the dtype and shape of a column's samples, without their first axis."""
    if isinstance(column, Ragged):
        return f"{column.values.dtype}[{', '.join(map(str, ('*', *column.values.shape[1:])))}]"
    if column.ndim == 1:
        return str(column.dtype)
    return f"{column.dtype}[{', '.join(map(str, ('*', *column.shape[2:])))}]"


def _join(parts: Sequence[Columns]) -> dict[str, Column]:
    return {name: _join_column([part[name] for part in parts]) for name in parts[0]}


def _join_column(columns: Sequence[Any]) -> Column:
    if isinstance(columns[0], Mapping):
        return _join(columns)
    none_ragged = not any(isinstance(column, Ragged) for column in columns)
    if none_ragged and len({column.shape[1:] for column in columns}) == 1:
        return np.concatenate(columns)
    ragged_columns = [as_ragged(column) for column in columns]
    sizes = np.concatenate([column.sizes for column in ragged_columns])
    values = np.concatenate([column.flat for column in ragged_columns])
    return Ragged(values, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def as_ragged(column: Any) -> Ragged:
    """Return a column as `Ragged`; an array [samples, n, …], of samples of equal size, is converted."""
    if isinstance(column, Ragged):
        return column
    samples, size = column.shape[:2]
    offsets = np.arange(samples + 1, dtype=np.int64) * size
    return Ragged(column.reshape(samples * size, *column.shape[2:]), offsets)


def _column(name: str, values: Sequence[Any], numbers: Sequence[int]) -> Column:
    if isinstance(values[0], Mapping):
        try:
            return stack(values, numbers)
        except ValueError as error:
            raise ValueError(f"in {name}: {error}") from None
    arrays = [_array(name, value, number) for number, value in zip(numbers, values, strict=True)]
    head = arrays[0]
    for number, array in zip(numbers, arrays, strict=True):
        if (array.dtype, array.ndim, array.shape[1:]) != (head.dtype, head.ndim, head.shape[1:]):
            raise ValueError(
                f"sample {number}: {name} is {array.dtype}{list(array.shape)}, "
                f"in the first sample {head.dtype}{list(head.shape)}; the type and all axes but the first must be alike"
            )
    if all(array.shape == head.shape for array in arrays):
        return np.stack(arrays)
    sizes = np.array([0, *(len(array) for array in arrays)], dtype=np.int64)
    return Ragged(np.concatenate(arrays), np.cumsum(sizes))


def native_array(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of numbers as torch reads it: in this machine's byte order, and without a mask.

    Raises:
        ValueError: values are masked, or are floats that torch does not have; names the column.
    """
    if isinstance(array, np.ma.MaskedArray):
        if count := int(np.count_nonzero(np.ma.getmaskarray(array))):
            raise ValueError(
                f"{name} has {count:,} masked value{'s' * (count > 1)}, which would count as data; "
                f"fill them, {name}.filled(…), and give the mask as a column of its own"
            )
        array = np.asarray(array)
    if array.dtype.kind in "fc" and array.real.dtype.itemsize > 8:
        raise ValueError(f"{name} is {array.dtype}, which torch does not have; give float64")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _array(name: str, value: Any, number: int) -> NDArray[Any]:
    try:
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.empty(0, dtype=object)
    if array.dtype.kind in NUMBERS:
        try:
            return native_array(name, array)
        except ValueError as error:
            raise ValueError(f"sample {number}: {error}") from None
    hint = ""
    if isinstance(value, str):
        hint = "; encode text as numbers first, or leave the column out"
    elif value is None:
        hint = "; every sample needs a value of every column"
    elif array.dtype == object and isinstance(value, list | tuple):
        hint = "; lists within it differ in length"
    raise ValueError(
        f"sample {number}: {name} is {value!r:.60}, which is no array of numbers{hint}"
    )


def not_finite(samples: Columns) -> str:
    """Describe the first column with values that are not finite; an empty string if there is none."""
    for name, column in leaves(samples):
        values = column.flat if isinstance(column, Ragged) else column
        if values.dtype.kind != "f" or np.isfinite(values).all():
            continue
        wrong = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))
        if isinstance(column, Ragged):
            starts = column.offsets - column.offsets[0]
            wrong = np.unique(np.searchsorted(starts, wrong, side="right") - 1)
        return (
            f"{name} holds values that are not finite in {wrong.size:,} of {len(column):,} samples, "
            f"first in sample {wrong[0]}"
        )
    return ""


def dtype_of(column: NDArray[Any] | Ragged) -> np.dtype[Any]:
    """Return the type of a column's values."""
    return column.values.dtype if isinstance(column, Ragged) else column.dtype
