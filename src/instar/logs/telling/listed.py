"""A folder of runs as rows, without reading every record whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from instar.config.errors import ConfigError
from instar.logs.find import find_runs
from instar.logs.reading.glance import Glance, glance
from instar.logs.telling.state import STATES, Standing, stand
from instar.record.events import to_words
from instar.record.rundir import RunDir, runs_in

FEW = 32
"""Runs that are looked at sooner than threads are started."""
AT_ONCE = 4
_INNER = ("run", "kind", "events")
"""of a glance, but not of a list"""


@dataclass(frozen=True)
class Row:
    """A run in a list."""

    glance: Glance
    standing: Standing

    @property
    def reason(self) -> str:
        """Why it ended; of one that crashed and cannot be read, why it cannot."""
        unreadable = self.glance.fault if self.standing.state == "crashed" else ""
        return unreadable or self.standing.reason

    @property
    def time_s(self) -> float | None:
        """From its first start to its last line."""
        started, seen = self.glance.started, self.glance.seen
        return None if started is None or seen is None else seen - started


def to_json(row: Row) -> dict[str, Any]:
    """All of it in what JSON can say; what is not known is null."""
    glance, standing = row.glance, row.standing
    said: dict[str, Any] = {
        "path": str(glance.run.path),
        "id": glance.id,
        "name": glance.name,
        "state": standing.state,
        "reason": row.reason,
        "resumable": standing.resumable,
        "go_on": standing.go_on,
    }
    names = [field.name for field in fields(glance) if field.name not in _INNER]
    told: dict[str, Any] = to_words(said | {name: getattr(glance, name) for name in names})
    return told


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
    rows = [row for row in _rows(chosen, now) if state in (None, row.standing.state)]
    return rows if last is None else rows[-last:]


def faults(rows: Sequence[Row]) -> Iterator[str]:
    """What is wrong with those of which nothing can be read."""
    return (row.glance.fault for row in rows if row.glance.fault)


def _rows(runs: Sequence[RunDir], now: float | None) -> list[Row]:
    """Of many runs several at a time: while a disk brings one, others are read."""
    if len(runs) < FEW:
        return [_row(run, now) for run in runs]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda run: _row(run, now), runs))


def _row(run: RunDir, now: float | None) -> Row:
    seen = glance(run)
    return Row(seen, stand(run, seen.events, seen.seen or 0.0, now))


def _is_called(run: RunDir, name: str) -> bool:
    return any(fnmatchcase(text, name) for text in (run.name, run.path.name, run.id))


def _meant(state: str) -> str:
    from difflib import get_close_matches

    begun = [known for known in STATES if known.startswith(state.lower())]
    near = begun or get_close_matches(state.lower(), STATES, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(STATES)}"
