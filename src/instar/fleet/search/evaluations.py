"""Reads the evaluations of a run while it appends them: only new bytes, once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from instar.config.files import open_regular
from instar.logs.read.scan import blocks
from instar.record.events import NOT_AN_EVENT, VERSION, Placed, decode, metrics
from instar.record.rundir import RunDir

METRICS_FILE = "metrics.jsonl"
"""what a command that is no Instar run appends to in its folder: {"step": 100, "val/loss": 2.1}"""
_EVAL = b'{"v":%d,"kind":"eval"' % VERSION


class Evaluations:
    """The values of one metric in a folder; steps that were returned before are passed over, as a
    resumed run repeats them."""

    def __init__(self, folder: Path, metric: str, after: int = 0) -> None:
        """`after`: the last step that is known already."""
        self.metric = metric
        self.names: set[str] = set()
        """metrics that the run has recorded"""
        self._after = after
        self._ends = dict.fromkeys([RunDir(folder).events, folder / METRICS_FILE], 0)

    def new(self) -> Iterator[tuple[int, float]]:
        """Yield the step and the value of each new evaluation."""
        for path, begin in self._ends.items():
            with suppress(OSError):  # it does not exist yet
                if path.stat().st_size <= begin:
                    continue
                with open_regular(path) as file:
                    file.seek(begin)
                    for block, end in blocks(file, begin):
                        self._ends[path] = end
                        yield from self._in(block, path.name == METRICS_FILE)

    def _in(self, block: bytes, plain: bool) -> Iterator[tuple[int, float]]:
        for line in block.split(b"\n"):
            found = _plain(line) if plain else _event(line) if line.startswith(_EVAL) else None
            if found is None:
                continue
            step, values = found
            self.names.update(values)
            if step > self._after and self.metric in values:
                self._after = step
                yield step, values[self.metric]


def _event(line: bytes) -> tuple[int, dict[str, float]] | None:
    try:
        event = decode(line)
    except NOT_AN_EVENT:
        return None
    return (event.step, metrics(event)) if isinstance(event, Placed) else None


def _plain(line: bytes) -> tuple[int, dict[str, float]] | None:
    try:
        data = json.loads(line)
        step = data.pop("step")
        return int(step), {k: float(v) for k, v in data.items() if isinstance(v, int | float)}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
