"""A rank that says which samples its feed hands out; `forks.Child` runs it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from instar.cli.main import main
from instar.data.columns import Columns
from instar.data.loader import Prefetcher, StepBatch
from instar.data.order import Int64Array, Order
from instar.data.source import Source
from instar.tasks.language import LanguageTask


class _Numbered:
    """A source whose samples carry their own number through everything that is done to them."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.fingerprint = source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def weights(self, indices: Int64Array) -> float:
        return self._source.weights(indices)

    def read(self, indices: Int64Array, epoch: int = 0) -> Columns:
        return {**self._source.read(indices, epoch), "number": indices.copy()}


def report_samples(argv: Sequence[str]) -> int:
    """`instar ARGV`; each step is a line of JSON on the terminal that this rank was started on."""
    train_samples, take = LanguageTask.train_samples, Prefetcher.take
    terminal = os.dup(1)

    def number_samples(self: LanguageTask, course: int = 0) -> tuple[Source, Order]:
        source, order = train_samples(self, course)
        return _Numbered(source), order

    def telling(self: Prefetcher, cursor: int, *arguments: Any, **options: Any) -> StepBatch:
        batch = take(self, cursor, *arguments, **options)
        handed_out = [micro for micro in batch.micro_batches if micro.samples]
        numbers = [int(n) for micro in handed_out for n in micro.arrays["number"]]
        line = {"epoch": batch.plan.epoch, "start": batch.plan.start, "samples": numbers}
        os.write(terminal, json.dumps(line).encode() + b"\n")
        return batch

    LanguageTask.train_samples = number_samples  # type: ignore[method-assign]
    Prefetcher.take = telling  # type: ignore[method-assign]
    return main(argv)
