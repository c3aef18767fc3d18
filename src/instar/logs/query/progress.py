"""How far a run has come and when it will end, read again only when its record has changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from instar.config.budget import Budget, eta, parse_budget
from instar.logs.query.config import config_lines
from instar.logs.read.summary_cache import CachedSummary, cached_summary
from instar.record.events import Failed, RunFinished, RunStarted, Stop
from instar.record.rundir import RunDir

_BUDGET = re.compile(r"[^\s\[\],'\"]+")


@dataclass(frozen=True)
class RunProgress:
    """How far a run has come; unknown values are None."""

    step: int | None
    loss: float | None
    """of the last training step that was recorded"""
    operations: int
    """number of scheduled operations so far"""
    ends_at: float | None
    """Unix seconds at which the first budget will be used up at the pace since the last start; None
    if the run has ended"""


@dataclass
class ProgressReader:
    """Reads the progress of one run."""

    run: RunDir
    _stamp: tuple[int, int, int] = (0, 0, 0)
    _segments: int = -1
    _budgets: tuple[Budget, ...] = ()
    _progress: RunProgress | None = field(default=None)

    def read(self) -> RunProgress | None:
        """Return the progress; None if there is no record."""
        try:
            status = self.run.events.stat()
        except OSError:
            return None
        stamp = (status.st_size, status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            summary = cached_summary(self.run)
            if summary.segments != self._segments:  # a resume may have changed them
                self._budgets, self._segments = tuple(budgets_of(self.run)), summary.segments
            self._stamp, self._progress = stamp, progress_of(summary, self._budgets)
        return self._progress


def progress_of(summary: CachedSummary, budgets: Sequence[Budget]) -> RunProgress:
    """Return the progress of a run that ends when the first of its budgets is used up."""
    return RunProgress(summary.step, summary.loss, summary.operations, _ends_at(summary, budgets))


def budgets_of(run: RunDir) -> Iterator[Budget]:
    """Yield the budgets of a run's config (`train.until`), as far as they can be read."""
    text = " ".join(line.value for line in config_lines(run) if line.key == "train.until")
    for word in _BUDGET.findall(text):
        with suppress(ValueError):
            yield parse_budget(word)


def _ends_at(summary: CachedSummary, budgets: Sequence[Budget]) -> float | None:
    start = next((event for event in summary.events if isinstance(event, RunStarted)), None)
    last = summary.last
    if start is None or last is None or last.step <= start.step:
        return None
    if any(isinstance(event, Stop | RunFinished | Failed) for event in summary.events):
        return None
    steps = eta(budgets, last.counters, last.epoch, float(last.step))
    if steps is None:
        return None
    seconds_per_step = (last.time - start.time) / (last.step - start.step)
    return last.time + steps * seconds_per_step
