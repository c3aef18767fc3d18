"""Columns as bytes, for sending: a schema in JSON, then flat arrays. Nothing is unpickled.

    magic, 8 bytes | header's length, uint64 | header's xxh3-64, uint64 | header | arrays

The header is JSON: {"meta": …, "columns": {name: [type, shape] or [type, shape, samples] or
columns}}. The arrays stand in the same order, each at a multiple of 64 bytes; ragged columns
(`samples` of them) as their offsets and their values. Integers are little-endian.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from instar.data.columns import NUMBERS, Column, Columns, Ragged

Bytes = NDArray[np.uint8]

_MAGIC = b"INSTAR\x00\x01"
_FIXED = struct.Struct("<8sQQ")
_ALIGNMENT = 64


def encode(columns: Columns, meta: Mapping[str, Any]) -> Bytes:
    """Columns, and facts about them that JSON can say, in one buffer; every array is copied once.

    Raises ValueError where a column is no array of numbers, or `meta` has NaN or infinity.
    """
    arrays: list[NDArray[Any]] = []
    schema = _schema(columns, arrays)
    header = json.dumps({"meta": dict(meta), "columns": schema}, allow_nan=False).encode()
    at = _aligned(_FIXED.size + len(header))
    size = at + sum(_aligned(array.nbytes) for array in arrays)
    frame = np.empty(size, dtype=np.uint8)
    start = _FIXED.pack(_MAGIC, len(header), xxhash.xxh3_64_intdigest(header)) + header
    frame[:at] = np.frombuffer(start.ljust(at, b"\0"), dtype=np.uint8)
    for array in arrays:
        end = at + array.nbytes
        frame[at:end].view(array.dtype).reshape(array.shape)[...] = array
        at = _aligned(end)
        frame[end:at] = 0
    return frame


def decode(frame: Any) -> tuple[dict[str, Any], dict[str, Column]]:
    """The meta and the columns of a frame, any buffer; arrays are views into it.

    Raises ValueError where it is not a whole frame. Damage within the values is not looked for.
    """
    data: Bytes = np.frombuffer(frame, dtype=np.uint8)
    if data.size < _FIXED.size:
        raise ValueError(f"a frame of {data.size} bytes lacks its beginning")
    magic, length, digest = _FIXED.unpack(data[: _FIXED.size].tobytes())
    header = data[_FIXED.size : _FIXED.size + length].tobytes()
    if magic != _MAGIC or len(header) < length or xxhash.xxh3_64_intdigest(header) != digest:
        raise ValueError(f"a frame of {data.size} bytes does not begin as frames do")
    content = json.loads(header)
    body = _Body(data, _aligned(_FIXED.size + length))
    columns = _columns(content["columns"], body)
    if body.at != data.size:
        raise ValueError(f"a frame of {data.size} bytes should have {body.at}")
    return content["meta"], columns


@dataclass
class _Body:
    """The arrays of a frame; the next one begins at byte `at`."""

    data: Bytes
    at: int

    def take(self, dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
        end = self.at + dtype.itemsize * math.prod(shape)
        if end > self.data.size:
            raise ValueError(f"a frame of {self.data.size} bytes ends within its arrays")
        array = self.data[self.at : end].view(dtype).reshape(shape)
        self.at = _aligned(end)
        return array


def _columns(schema: Mapping[str, Any], body: _Body) -> dict[str, Column]:
    return {
        name: _columns(entry, body) if isinstance(entry, dict) else _column(entry, body)
        for name, entry in schema.items()
    }


def _column(entry: Sequence[Any], body: _Body) -> NDArray[Any] | Ragged:
    dtype, shape, *samples = entry
    if not samples:
        return body.take(np.dtype(dtype), shape)
    offsets = body.take(np.dtype(np.int64), [samples[0] + 1])
    values = body.take(np.dtype(dtype), shape)
    if offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any():
        raise ValueError("the offsets of a ragged column are damaged")
    return Ragged(values, offsets)


def _schema(columns: Columns, arrays: list[NDArray[Any]]) -> dict[str, Any]:
    """The columns' description; their arrays are appended to `arrays` in the same order."""
    return {
        name: _schema(column, arrays)
        if isinstance(column, Mapping)
        else _entry(name, column, arrays)
        for name, column in columns.items()
    }


def _entry(name: str, column: NDArray[Any] | Ragged, arrays: list[NDArray[Any]]) -> list[Any]:
    values = column.flat if isinstance(column, Ragged) else column
    if values.dtype.kind not in NUMBERS:
        raise ValueError(f"{name} is of type {values.dtype}, not of numbers")
    entry: list[Any] = [values.dtype.str, values.shape]
    if isinstance(column, Ragged):
        arrays.append(column.offsets - column.offsets[0])
        entry.append(len(column))
    arrays.append(values)
    return entry


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
