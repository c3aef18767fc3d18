"""Finds runs by folder, id, name or pattern, and lists them without reading records whole: as rows, and
as families: a trunk and the branches of its schedule in folders beside it.

Who belongs to whom is in the records, but only folders whose names say the same are looked at.
"""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from instar.config.errors import ConfigError, nearest, nearest_hint
from instar.logs.query.bases import notes_on_bases, recorded_basis
from instar.logs.query.labels import NONE, RunLabels, labels_of
from instar.logs.query.state import STATES, RunStatus, State, run_status
from instar.logs.read.reader_cache import CachedSummary, cached_summary
from instar.record.events import Branched, to_words
from instar.record.progress import track_items
from instar.record.rundir import RunDir, runs_in
from instar.tasks.basis import Basis, digest

_LATEST = "latest"
FEW = 32
"""number of runs that tell whether threads would help"""
AT_ONCE = 4
_INNER = ("run", "kind", "events", "last", "operations")
"""fields of `CachedSummary` that are not part of a list"""
T = TypeVar("T")


def find_runs(texts: Sequence[str], out_dir: Path = Path("runs")) -> list[RunDir]:
    """Return the runs that `texts` name, each once, in the order of the texts.

    A text is a run's folder, a file in one, a folder of runs, an id, a name (all runs of that name),
    `latest`, or a pattern of any of these (`runs/sharded_*/events.jsonl`, `demo-*`). Patterns and
    names are also looked up under `out_dir`. Without texts, the latest run.

    Raises:
        ConfigError: a text names no run; suggests one.
    """
    runs: dict[Path, RunDir] = {}
    for text in texts or (_LATEST,):
        for run in _resolve(text, out_dir):
            runs.setdefault(run.path.resolve(), run)
    return list(runs.values())


def _resolve(text: str, out_dir: Path) -> list[RunDir]:
    path = Path(text)
    if text and (run := _run_containing(path)) is not None:
        return [run]
    if text and path.is_dir() and (inside := runs_in(path)):
        return inside
    if glob.has_magic(text):
        if matching_runs := list(_matching(text, out_dir)):
            return matching_runs
        raise ConfigError.of(f"no run matches {text!r}", hint=_latest_hint(out_dir))
    runs = runs_in(out_dir)
    if text == _LATEST and runs:
        return runs[-1:]
    exact = [run for run in runs if text in (run.path.name, run.id)]
    if matches := exact or [run for run in runs if run.name == text]:
        return matches
    raise _no_run(text, out_dir)


def _run_containing(path: Path) -> RunDir | None:
    """Return the run whose folder is `path` or contains it."""
    folders = path.parents if path.is_file() else [path]
    # the working directory has no name by which a run could be called
    runs = (RunDir(folder if folder.name else folder.absolute()) for folder in folders)
    return next((run for run in runs if run.holds_run()), None)


def _matching(pattern: str, out_dir: Path) -> Iterator[RunDir]:
    for base in ("", str(out_dir)):
        texts = sorted(glob.glob(pattern, root_dir=base or None, recursive=True))  # noqa: PTH207 (absolute ones too)
        runs = list(_runs_at(Path(base, text) for text in texts))
        if runs:
            yield from runs
            return


def _runs_at(paths: Iterable[Path]) -> Iterator[RunDir]:
    for path in paths:
        run = _run_containing(path)
        if run is not None:
            yield run


def _no_run(text: str, out_dir: Path) -> ConfigError:
    path = Path(text)
    if text and path.is_dir():
        return ConfigError.of(f"{path} is neither a run nor a folder of runs: it has no run.yaml")
    as_path = path.parent != Path()
    folder = path.parent if as_path else out_dir
    runs = runs_in(folder)
    if as_path and not path.exists():
        where = f"{folder} has no run" if folder.is_dir() else ""
        if not runs:
            return ConfigError.of(f"no folder {text}", hint=where)
    elif not runs:
        return ConfigError.of(f"no run in {folder}", hint="start one with instar train")
    names = [str(run.path) for run in runs]
    if not as_path:
        names = [name for run in runs for name in (run.path.name, run.name, run.id)]
    hint = nearest_hint(str(path) if as_path else text, names, _latest_hint(folder), cutoff=0.5)
    return ConfigError.of(f"no run {text!r}{'' if as_path else f' in {folder}'}", hint=hint)


def _latest_hint(out_dir: Path) -> str:
    runs = runs_in(out_dir)
    if not runs:
        return f"there is no run in {out_dir}"
    return f"the latest of {len(runs)} in {out_dir} is {runs[-1].path.name!r}"


@dataclass(frozen=True)
class Row:
    """A run in a list."""

    summary: CachedSummary
    status: RunStatus
    labels: RunLabels = NONE
    basis: Basis = field(default_factory=dict)
    """what its last evaluation was made on; empty if nothing is recorded"""

    @property
    def reason(self) -> str:
        """Why the run ended, or why the record of a crashed run cannot be read."""
        unreadable = self.summary.fault if self.status.state == "crashed" else ""
        return unreadable or self.status.reason

    @property
    def time_s(self) -> float | None:
        """Seconds from the first start to the last line; None: unknown."""
        began, last_seen = self.summary.started, self.summary.seen
        return last_seen - began if began and last_seen else None


def row_to_json(row: Row) -> dict[str, Any]:
    """Return a row as JSON-ready data; unknown values are null."""
    summary, status = row.summary, row.status
    fixed: dict[str, Any] = {
        "path": str(summary.run.path),
        "id": summary.id,
        "name": summary.name,
        "state": status.state,
        "reason": row.reason,
        "resumable": status.resumable,
        "go_on": status.go_on,
        "tags": row.labels.tags,
        "note": row.labels.note,
        "archived": row.labels.archived,
        "basis": digest(row.basis),
    }
    if (first := branch_start(summary)) is not None:
        fixed["branch_of"] = {"run": first.parent, "step": first.step, "name": first.name}
    names = [field.name for field in fields(summary) if field.name not in _INNER]
    as_json: dict[str, Any] = to_words(fixed | {name: getattr(summary, name) for name in names})
    return as_json


def list_rows(
    runs: Sequence[RunDir],
    *,
    state: str | None = None,
    name: str | None = None,
    tag: str | None = None,
    archived: bool = False,
    last: int | None = None,
) -> list[Row]:
    """Return rows of the runs that match `state`, `name` and `tag`, at most the `last` ones.

    Args:
        name: a run's name, folder or id, or a pattern of these.
        archived: whether archived runs are included.

    Raises:
        ConfigError: the state is unknown.
    """
    if state is not None and state not in STATES:
        raise ConfigError.of(f"unknown state {state!r}", "--state", _state_hint(state))
    matches = [
        (run, labels)
        for run, labels in zip(runs, labels_of(runs), strict=True)
        if (name is None or _matches(run, name))
        and (tag is None or tag in labels.tags)
        and (archived or not labels.archived)
    ]
    if state is None and last is not None:
        matches = matches[-last:]
    rows = [row for row in _rows(matches) if state in (None, row.status.state)]
    return rows if last is None else rows[-last:]


def row_faults(rows: Sequence[Row]) -> Iterator[str]:
    """Yield why runs cannot be read."""
    return (row.summary.fault for row in rows if row.summary.fault)


def row_notes(rows: Sequence[Row]) -> list[str]:
    """Return which best values of a list cannot be compared with the first one."""
    return notes_on_bases({row.summary.run.path.name: row.basis for row in rows})


def _rows(runs: Sequence[tuple[RunDir, RunLabels]]) -> list[Row]:
    """Read many runs in threads if they wait for the disk; others would only take turns."""
    first, later_runs = runs[:FEW], runs[FEW:]
    began, cpu_s = time.perf_counter(), time.thread_time()
    rows = [_row(*pair) for pair in first]
    cpu_s = time.thread_time() - cpu_s
    wait_s = time.perf_counter() - began - cpu_s
    if not later_runs:
        return rows
    with ExitStack() as stack:
        more: Iterator[Row] = (_row(*pair) for pair in later_runs)
        if wait_s > cpu_s:
            pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
            more = pool.map(lambda pair: _row(*pair), later_runs)
        return rows + list(track_items(more, "reading records", "runs", len(later_runs)))


def _row(run: RunDir, labels: RunLabels) -> Row:
    summary = cached_summary(run)
    status = run_status(run, summary.events, summary.seen or 0.0)
    may_have_basis = summary.best is not None and status.resumable
    return Row(summary, status, labels, recorded_basis(run) if may_have_basis else {})


def _matches(run: RunDir, name: str) -> bool:
    return any(fnmatchcase(text, name) for text in (run.name, run.path.name, run.id))


def _state_hint(state: str) -> str:
    full_name = next((name for name in STATES if name.startswith(state.lower())), None)
    near = full_name or nearest(state, STATES)
    return f"did you mean {near!r}?" if near else f"expected one of {', '.join(STATES)}"


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
