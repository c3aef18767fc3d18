"""Families of runs: a trunk and the branches of its schedule, in folders beside it.

Who belongs to whom is in the records, but only folders whose names say the same are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from instar.logs.query.state import State, run_status
from instar.logs.read.summary_cache import CachedSummary, cached_summary
from instar.record.events import Branched
from instar.record.rundir import RunDir

T = TypeVar("T")


@dataclass(frozen=True)
class RunTreeMember:
    """A run of a family."""

    name: str
    """of its folder"""
    depth: int
    """0: the trunk; 1: its branches"""
    branched_at: int | None
    """step of the trunk at which it begins; None: the trunk"""
    state: State
    step: int | None
    best: float | None
    """best value of `best_metric`"""
    best_metric: str
    """the held-out metric that `checkpoints/best` follows"""


def branch_start(summary: CachedSummary) -> Branched | None:
    """Return how a run began if it is a branch, and its folder has the name of one."""
    first = next((event for event in summary.events if isinstance(event, Branched)), None)
    if (
        first is None
        or not first.parent.strip(".")
        or summary.run.path.absolute().name != f"{first.parent}.{first.name}"
    ):
        return None
    return first


def in_trees(items: Sequence[T], summary_of: Callable[[T], CachedSummary]) -> list[tuple[int, T]]:
    """Return runs with their depths: branches follow their trunk, in the order of their steps; a family is at
    the place of its last member."""
    by_path = {summary_of(item).run.path.absolute(): item for item in items}
    children: dict[Path, list[tuple[int, Path]]] = {}
    roots: dict[Path, None] = {}
    for path, item in reversed(by_path.items()):
        above = branch_start(summary_of(item))
        parent = path if above is None else path.with_name(above.parent)
        if above is None or parent not in by_path:
            roots.setdefault(path)
        else:
            children.setdefault(parent, []).append((above.step, path))
            roots.setdefault(_root(parent, by_path, summary_of))

    def tree(path: Path, depth: int) -> Iterator[tuple[int, T]]:
        yield depth, by_path[path]
        for _, child in sorted(children.get(path, ())):
            yield from tree(child, depth + 1)

    return [node for root in reversed(roots) for node in tree(root, 0)]


def _root(path: Path, by_path: dict[Path, T], summary_of: Callable[[T], CachedSummary]) -> Path:
    above = branch_start(summary_of(by_path[path]))
    if above is None or (parent := path.with_name(above.parent)) not in by_path:
        return path
    return _root(parent, by_path, summary_of)  # a name is longer than its parent's


def run_tree(run: RunDir) -> tuple[RunTreeMember, ...]:
    """Return the trunk of a run and all branches, in the order of a tree; empty without any."""
    trunk = run
    while (above := branch_start(cached_summary(trunk))) is not None:
        parent = RunDir(trunk.path.absolute().with_name(above.parent))
        if not parent.holds_run():
            break
        trunk = parent
    path = trunk.path.absolute()
    try:
        siblings = [
            sibling for sibling in path.parent.iterdir() if sibling.name.startswith(f"{path.name}.")
        ]
    except OSError:
        siblings = []
    summaries = [
        cached_summary(member_run) for member_run in (trunk, *map(RunDir, sorted(siblings)))
    ]
    members = [summary for summary in summaries if summary.run is trunk or branch_start(summary)]
    if len(members) == 1 and branch_start(members[0]) is None:
        return ()
    return tuple(
        _member(member, depth) for depth, member in in_trees(members, lambda summary: summary)
    )


def _member(summary: CachedSummary, depth: int) -> RunTreeMember:
    first = branch_start(summary)
    return RunTreeMember(
        name=summary.run.path.absolute().name,
        depth=depth,
        branched_at=None if first is None else first.step,
        state=run_status(summary.run, summary.events, summary.seen or 0.0).state,
        step=summary.step,
        best=summary.best,
        best_metric=summary.best_metric,
    )
