"""Predictions of the final test: one Parquet file of all ranks, and its confusion matrices. Requires pyarrow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from instar.data.columns import Columns, Ragged, leaves
from instar.data.order import Int64Array
from instar.distributed.agree import gather_parts, raise_on_all_ranks
from instar.distributed.world import World
from instar.record.atomic import replace_file

MAX_CLASSES = 1024
"""of a confusion matrix"""
MAX_COUNTS = 2 * MAX_CLASSES**2
"""of all confusion matrices, so that `result.json` can be read again"""
SAMPLE = "sample"
"""column of the sample's number in the data"""
PREDICTED = ".predicted"
"""suffix of a column of predictions, after the name of the target's column"""


class Predictions:
    """Gathers the predictions of all ranks into one Parquet file."""

    def __init__(self, file: Path, world: World, numbers: Int64Array | None = None) -> None:
        """
        Args:
            numbers: sample numbers of the split, [samples]; default: positions in the split.
        """
        self._file, self._world, self._numbers = file, world, numbers
        self._tables: list[Any] = []
        self.samples = 0
        """number of samples with predictions in the file that `finish` wrote; set on rank 0"""

    def add(self, places: Int64Array, predictions: Columns) -> None:
        """Add the predictions of samples of this rank.

        Args:
            places: positions of the samples in the split.
        """
        numbers = places if self._numbers is None else self._numbers[places]
        columns = {SAMPLE: pa.array(numbers)}
        columns |= {name: _array(name, column) for name, column in leaves(predictions)}
        self._tables.append(pa.table(columns))

    def finish(self) -> Path | None:
        """Write the file on rank 0. A collective.

        The ranks' parts are sent through the process group, because hosts may not share a file
        system.

        Returns:
            the file on rank 0; None on other ranks, and if there are no predictions.
        """
        part = b""
        with raise_on_all_ranks(self._world, "encoding predictions"):
            if self._tables:
                part = _encode(self._tables)
        parts = gather_parts(self._world, part)
        with raise_on_all_ranks(self._world, "writing predictions"):
            if tables := [pq.read_table(pa.BufferReader(table)) for table in parts if table]:
                self.samples = len(set().union(*(table[SAMPLE].to_pylist() for table in tables)))
                replace_file(self._file, _encode(tables, sort=True))
        return self._file if self.samples else None

    def confusion(self) -> dict[str, list[list[int]]]:
        """See `confusion_matrices`, of the file that `finish` wrote."""
        return confusion_matrices(self._file)


def _encode(tables: Sequence[Any], *, sort: bool = False) -> bytes:
    table, sink = pa.concat_tables(tables), pa.BufferOutputStream()
    pq.write_table(table.sort_by(SAMPLE) if sort else table, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def confusion_matrices(file: Path) -> dict[str, list[list[int]]]:
    """Return the confusion matrix of every classification target: counts by true class (row) and
    predicted class (column). Targets of -1 are ignored.

    Other numbers that a custom task predicts (counts, ids) are no classes: without a matrix are targets with more than
    MAX_CLASSES of them, with negative predictions, with fractions, or in another form than the predictions.
    """
    table = pq.read_table(file)
    matrices: dict[str, list[list[int]]] = {}
    room = MAX_COUNTS
    for name in table.column_names:
        target = name.removesuffix(PREDICTED)
        if target == name or target not in table.column_names:
            continue
        of_target, of_name = _flat(table[target]), _flat(table[name])
        if not pa.types.is_integer(of_name.type):
            continue
        true = _classes(of_target.to_numpy(zero_copy_only=False))
        if true is None or len(true) != len(of_name):
            continue
        predictions, has_target = of_name.to_numpy().astype(np.int64), true >= 0
        classes = int(max(true.max(initial=-1), predictions.max(initial=-1))) + 1
        if not 0 < classes <= MAX_CLASSES or predictions.min(initial=0) < 0 or classes**2 > room:
            continue
        room -= classes**2
        matrix = np.zeros((classes, classes), dtype=np.int64)
        np.add.at(matrix, (true[has_target], predictions[has_target]), 1)
        matrices[target] = matrix.tolist()
    return matrices


def _classes(target: NDArray[Any]) -> Int64Array | None:
    """Return a target of whole numbers, of any type; NaN is no target, -1. None: it has others."""
    if target.dtype.kind not in "biuf":
        return None
    if target.dtype.kind == "f":
        target = np.where(np.isnan(target), -1, target)
        if (np.abs(target) > MAX_CLASSES).any() or (target != np.rint(target)).any():
            return None
    return target.astype(np.int64)


def _flat(column: Any) -> Any:
    """Flatten a column of node-level predictions; return others unchanged."""
    lists = pa.types.is_list(column.type)
    return pc.list_flatten(column) if lists else column


def _array(name: str, column: NDArray[Any] | Ragged) -> Any:
    if isinstance(column, Ragged):
        offsets = column.offsets - column.offsets[0]
        return pa.ListArray.from_arrays(offsets.astype(np.int32), _array(name, column.flat))
    if column.ndim == 1:
        return pa.array(column)
    if column.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(column.reshape(-1)), column.shape[1])
    raise ValueError(
        f"{name}: a prediction is a number or a list of numbers, not {column.shape[1:]}"
    )
