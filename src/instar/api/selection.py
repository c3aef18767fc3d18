"""Which runs the arguments of a command name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from instar.extensions import run_set
from instar.logs.query.runs import find_runs
from instar.record.rundir import RunDir, holds_runs, runs_in

RUNS = Path("runs")
"""where ids and names of runs are looked up"""


def selected_runs(runs: Sequence[str], *, every: bool = False) -> list[RunDir]:
    """Find the runs that the arguments name; with `every` and no arguments, all in `runs`.

    Raises:
        ConfigError: an argument names no run.
    """
    return [*selected_groups(runs, every=every)]


def listed_runs(folders: Sequence[str]) -> list[RunDir]:
    """Find the runs in these folders or of these fleets, by default those in `runs`; an empty folder has none.

    Raises:
        ConfigError: no such folder or run exists, or a pattern matches none.
    """
    if not folders:
        return runs_in(RUNS)
    texts = [text for text in folders if not _is_empty(Path(text))]
    return selected_runs(texts) if texts else []


def _is_empty(path: Path) -> bool:
    """Return whether a path is a folder that is no run and no fleet, and has no runs."""
    is_other_folder = path.is_dir() and run_set(path) is None and not RunDir(path).holds_run()
    return is_other_folder and not holds_runs(path)


def selected_groups(runs: Sequence[str], *, every: bool = False) -> dict[RunDir, str]:
    """Find the runs that the arguments name, each with its group if the argument is the folder of a set of runs,
    such as a fleet, else with an empty one.

    Raises:
        ConfigError: an argument names no run.
    """
    groups: dict[Path, tuple[RunDir, str]] = {}
    for text in runs or ([str(RUNS)] if every else ["latest"]):
        set_of_runs = run_set(Path(text)) if text else None
        if set_of_runs is not None:
            group_by_run = set_of_runs(Path(text))
        else:
            group_by_run = dict.fromkeys(find_runs([text], RUNS), "")
        for run, group in group_by_run.items():
            groups.setdefault(run.path.resolve(), (run, group))
    return dict(groups.values())
