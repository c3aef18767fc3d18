"""What a test says of each sample, as a Parquet file in the samples' order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instar.checkpoint.disk import replace_file
from instar.data.columns import Columns, Ragged, leaves
from instar.data.order import Int64Array
from instar.distributed.agree import together
from instar.distributed.world import World

FILE = "predictions.parquet"
SAMPLE = "sample"
"""the column with a sample's number in the data"""
PREDICTED = ".predicted"
"""what a column of predictions is called beside that of its targets"""


class Predictions:
    """Gathers every rank's share; the ranks' parts become one file. Needs pyarrow."""

    def __init__(self, folder: Path, world: World, numbers: Int64Array | None = None) -> None:
        """`numbers`: what the split's samples are called; default: their places in it."""
        self._folder, self._world, self._numbers = folder, world, numbers
        self._tables: list[Any] = []

    @staticmethod
    def clear(folder: Path) -> None:
        """Remove what an earlier test has left."""
        for file in (folder / FILE, *folder.glob(".part-*")):
            file.unlink(missing_ok=True)

    def see(self, places: Int64Array, predicted: Columns) -> None:
        """Take in what was predicted of some samples of this rank."""
        import pyarrow as pa

        numbers = places if self._numbers is None else self._numbers[places]
        columns = {SAMPLE: pa.array(numbers)}
        columns |= {name: _array(name, column) for name, column in leaves(predicted)}
        self._tables.append(pa.table(columns))

    def finish(self) -> Path | None:
        """Write the file; None where the task predicts nothing. All ranks come here together."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        with together(self._world, "writing predictions"):
            if self._tables:
                pq.write_table(pa.concat_tables(self._tables), self._part(self._world.rank))
        whole = self._folder / FILE
        with together(self._world, "joining predictions"):
            if self._world.is_main:
                parts = [self._part(rank) for rank in range(self._world.size)]
                there = [part for part in parts if part.exists()]
                if there:
                    table = pa.concat_tables([pq.read_table(part) for part in there])
                    sink = pa.BufferOutputStream()
                    pq.write_table(table.sort_by(SAMPLE), sink)
                    replace_file(whole, sink.getvalue().to_pybytes())
                for part in there:
                    part.unlink()
        return whole if whole.exists() else None

    def _part(self, rank: int) -> Path:
        return self._folder / f".part-{rank}.parquet"


def confusion(file: Path) -> dict[str, list[list[int]]]:
    """Of every class that is predicted, how often each true class (row) was taken for each (column);
    a target of -1 is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(file)
    found = {}
    for name in table.column_names:
        target = name.removesuffix(PREDICTED)
        if target == name or target not in table.column_names:
            continue
        of_target, of_name = _flat(table[target]), _flat(table[name])
        if not pa.types.is_integer(of_name.type):
            continue
        true, said = of_target.to_numpy(), of_name.to_numpy()
        counted = true >= 0
        classes = int(max(true.max(), said.max())) + 1
        matrix = np.zeros((classes, classes), dtype=np.int64)
        np.add.at(matrix, (true[counted], said[counted]), 1)
        found[target] = matrix.tolist()
    return found


def _flat(column: Any) -> Any:
    """What is predicted of nodes, end to end; of whole samples as it is."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = pa.types.is_list(column.type)
    return pc.list_flatten(column) if lists else column


def _array(name: str, column: NDArray[Any] | Ragged) -> Any:
    import pyarrow as pa

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
