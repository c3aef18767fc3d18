"""A folder of runs as rows, without reading every record whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from instar.config.errors import ConfigError
from instar.logs.find import find_runs
from instar.logs.reading.glance import glance
from instar.logs.telling.state import STATES, State, stand
from instar.record.rundir import RunDir, runs_in

FEW = 32
"""Runs that are looked at sooner than threads are started."""
AT_ONCE = 4


@dataclass(frozen=True)
class Row:
    """A run in a list; what is not known is None."""

    path: str
    id: str
    name: str
    state: State
    reason: str
    resumable: bool
    go_on: str
    model: str
    unit: str
    """what `tokens` counts"""
    segments: int
    step: int | None
    tokens: int | None
    loss: float | None
    val: float | None
    """the last validation loss"""
    val_step: int | None
    best: float | None
    """the lowest validation loss that is not superseded"""
    best_step: int | None
    started: float | None
    """Unix seconds"""
    seen: float | None
    """Unix seconds of its last line"""
    fault: str
    """why nothing can be read of it"""

    @property
    def time_s(self) -> float | None:
        """From its first start to its last line."""
        return None if self.started is None or self.seen is None else self.seen - self.started


def runs_of(folders: Sequence[str], out_dir: Path) -> list[RunDir]:
    """The runs in these folders, or in `out_dir` if none is given; a run itself counts too.

    Raises:
        ConfigError: there is no such folder, run or pattern.
    """
    if not folders:
        return runs_in(out_dir)
    found: dict[Path, RunDir] = {}
    for text in folders:
        path = Path(text)
        empty = path.is_dir() and not RunDir(path).holds_run() and not runs_in(path)
        for run in [] if empty else find_runs([text], out_dir):
            found.setdefault(run.path.resolve(), run)
    return list(found.values())


def listed(
    runs: Sequence[RunDir],
    *,
    state: str | None = None,
    name: str | None = None,
    last: int | None = None,
    now: float | None = None,
) -> list[Row]:
    """Rows of those runs that are in this state and bear this name, at most the `last` ones.

    Args:
        name: also a pattern; of a run's name, its folder or its id.
        now: Unix seconds, for whether a run elsewhere still speaks.

    Raises:
        ConfigError: there is no such state.
    """
    if state is not None and state not in STATES:
        raise ConfigError.one(f"there is no state {state!r}", "--state", _meant(state))
    chosen = [run for run in runs if name is None or _is_called(run, name)]
    if state is None and last is not None:
        chosen = chosen[-last:]
    rows = [row for row in _rows(chosen, now) if state in (None, row.state)]
    return rows if last is None else rows[-last:]


def faults(rows: Sequence[Row]) -> Iterator[str]:
    """What is wrong with those of which nothing can be read."""
    return (row.fault for row in rows if row.fault)


def _rows(runs: Sequence[RunDir], now: float | None) -> list[Row]:
    """Of many runs several at a time: while a disk brings one, others are read."""
    if len(runs) < FEW:
        return [_row(run, now) for run in runs]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda run: _row(run, now), runs))


def _row(run: RunDir, now: float | None) -> Row:
    seen = glance(run)
    standing = stand(run, seen.events, seen.seen or 0.0, now)
    unreadable = seen.fault if standing.state == "crashed" else ""
    return Row(
        path=str(run.path),
        id=seen.id,
        name=seen.name,
        state=standing.state,
        reason=unreadable or standing.reason,
        resumable=standing.resumable,
        go_on=standing.go_on,
        model=seen.model,
        unit=seen.unit,
        segments=seen.segments,
        step=seen.step,
        tokens=seen.tokens,
        loss=seen.loss,
        val=seen.val,
        val_step=seen.val_step,
        best=seen.best,
        best_step=seen.best_step,
        started=seen.started,
        seen=seen.seen,
        fault=seen.fault,
    )


def _is_called(run: RunDir, name: str) -> bool:
    return any(fnmatchcase(text, name) for text in (run.name, run.path.name, run.id))


def _meant(state: str) -> str:
    from difflib import get_close_matches

    begun = [known for known in STATES if known.startswith(state.lower())]
    near = begun or get_close_matches(state.lower(), STATES, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(STATES)}"
