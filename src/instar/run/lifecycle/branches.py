"""The branches of a run that has ended: which of them are left to train."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.distributed.agree import agree, raise_on_all_ranks
from instar.logs.query.state import run_status
from instar.logs.read.summary_cache import cached_summary
from instar.record.rundir import RunDir
from instar.run.lifecycle.load import load_config
from instar.run.loop.components import Components
from instar.run.loop.state import RunState
from instar.schedule.branches import BRANCH, branch_of, folder_of


def unfinished_branches(
    state: RunState, parts: Components, root: Path
) -> list[tuple[RunDir, Loaded]]:
    """Return the branches of the run in `root` that have not ended, in the order of their steps, with
    their configs. A collective.

    Those that are gone, or that another process trains, are left out with a warning; those with `train: false`,
    without one.

    Raises:
        ConfigError, PeerError: the config of one cannot be read.
    """
    found: list[str] = []
    with raise_on_all_ranks(parts.world, "looking for branches"):
        if parts.world.is_main:
            made = [
                branch_of(change.operation)
                for change in state.history
                if change.operation.name == BRANCH and not change.skipped
            ]
            begun = [branch.name for branch in made]
            for entry in parts.entries:
                if entry.operation.name == BRANCH and entry.operation.value not in begun:
                    parts.logger.console.warn(f"the branch {entry.operation.value} never began")
            found = [
                branch.name
                for branch in made
                if branch.train and _is_left(branch.name, root, parts)
            ]
    names = cast("list[str]", agree(parts.world, list(found)))
    branches = []
    with raise_on_all_ranks(parts.world, "reading the configs of branches"):
        for name in names:
            run = RunDir(_relative(folder_of(root, name), root))
            # the code of the task is the trunk's: what the file names is not imported before this is known
            task = load_config(str(run.config), import_task=False).config.task
            if task != parts.config.task:
                raise ConfigError.one(
                    f"task is {task}, and that of its trunk {parts.config.task}",
                    where=str(run.config),
                )
            branches.append((run, load_config(str(run.config), resuming=True)))
    return branches


def _relative(folder: Path, root: Path) -> Path:
    """Return the folder as `root` is written: relative to the working directory, or absolute."""
    return folder if root.is_absolute() else root.parent / folder.name


def _is_left(name: str, root: Path, parts: Components) -> bool:
    run = RunDir(folder_of(root, name))
    if not run.holds_run():
        parts.logger.console.warn(f"the branch {name} is gone: there is no run in {run.path}")
        return False
    summary = cached_summary(run)
    status = run_status(run, summary.events, summary.seen or 0.0)
    if status.state == "running":
        by = f" by process {status.process}" if status.process else ""
        parts.logger.console.warn(f"the branch {name} is being trained{by}, and is left to it")
    return status.state in ("stopped", "crashed")
