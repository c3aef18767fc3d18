"""A source that worker processes read."""

from __future__ import annotations

from collections.abc import Callable

from instar.data.columns import Columns, join_columns
from instar.data.order import Int64Array
from instar.data.source import Measure, Source, measure_of
from instar.processes.pool import Workers


class WorkerSource:
    """A source read by worker processes, each of which reads a part of the samples.

    It is also opened in this process, to answer queries that need no reading.
    """

    def __init__(self, open_source: Callable[[], Source], number: int) -> None:
        """
        Args:
            open_source: opens the same source in every process, see `Workers`.
        """
        self._source = open_source()
        self.workers = Workers(open_source, number)
        self.fingerprint = self._source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    @property
    def measure(self) -> Measure | None:
        return measure_of(self._source)

    def weights(self, indices: Int64Array) -> float:
        return self._source.weights(indices)

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        """Return the source's samples; raises the source's exceptions, or `WorkerLost`."""
        size = indices.size
        number = max(1, min(len(self.workers), size))
        futures = [
            self.workers.call(
                worker,
                "read",
                indices[size * worker // number : size * (worker + 1) // number],
                epoch,
            )
            for worker in range(number)
        ]
        parts: list[Columns] = [future.result() for future in futures]
        return join_columns(parts) if number > 1 else parts[0]

    def close(self) -> None:
        """Stop the workers. Idempotent."""
        self.workers.close()
