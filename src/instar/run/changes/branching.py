"""Branches of a live run: runs of their own beside the trunk, which begin with its state; and which of them are left to
train when it has ended."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.manifest import CheckpointError, read_manifest
from instar.checkpoint.store import publish_checkpoint
from instar.config.errors import ConfigError
from instar.config.fields import with_values
from instar.config.load import Loaded
from instar.config.origins import config_text
from instar.distributed.agree import agree, raise_on_all_ranks
from instar.logs.query.state import run_status
from instar.logs.read.reader_cache import cached_summary
from instar.record import atomic
from instar.record.events import Branched, read_events
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir
from instar.record.start_folder import note_branch
from instar.run.checkpointing import snapshot
from instar.run.components import Components
from instar.run.load_config import load_run_config
from instar.run.output.save import Snapshot
from instar.run.state.early_stopping import MetricState
from instar.run.state.run_state import RunState
from instar.schedule.branches import BRANCH, Branch, branch_folder, read_branch
from instar.schedule.operations import (
    Change,
    History,
    effective_changes,
    history_of_branch,
    history_to_json,
    overrides,
)


def publish_branch(state: RunState, parts: Components, change: Change) -> Path:
    """Publish the run of a branch, whose first checkpoint has the present state; return its folder.

    A collective. The folder appears when it is complete. If it is there already, because this run was killed
    after the branch and has reached its step again, it stays as it is.

    Raises:
        CheckpointError, PeerError: it cannot be written.
        ValueError: the folder is not a branch of this run.
    """
    world, branch = parts.world, read_branch(change.operation)
    trunk = parts.saver.root.absolute()
    folder = branch_folder(trunk, branch.name)
    history = history_of_branch(state.history, branch, trunk.name, change.step, change.cursor)
    exists = False
    with raise_on_all_ranks(world, "looking for the branch"):
        if world.is_main and (exists := folder.exists()):
            _check_existing(folder, trunk, history, parts, change)
    if agree(world, exists):
        return folder
    parts.stepper.share_buffers()
    first_snapshot = _first_checkpoint(state, parts, branch, history)
    first_snapshot.check_replicas(world)
    try:
        with ExitStack() as publishing:
            temporary = ""
            with raise_on_all_ranks(world, "opening the branch's folder"):
                if world.is_main:
                    atomic.sweep(folder.parent, folder.name)
                    temporary = str(publishing.enter_context(atomic.atomic_dir(folder)))
            root = Path(str(agree(world, temporary)))
            first = publish_checkpoint(root, state.step, first_snapshot, world=world)
            with raise_on_all_ranks(world, "publishing the branch"):
                if world.is_main:
                    _fill(RunDir(root), trunk.name, branch, first.name, parts, history)
                    note_branch(RunDir(trunk), RunDir(root))
                    publishing.close()
    except atomic.WriteError as error:
        raise CheckpointError(str(error)) from error
    return folder


def _first_checkpoint(
    state: RunState, parts: Components, branch: Branch, history: History
) -> Snapshot:
    """Return the snapshot of a branch that has made no evaluation of its own, and of which nobody has asked
    anything yet. A collective."""
    began = replace(
        state,
        history=history,
        metrics=MetricState(),
        evaluated_metrics={},
        losses=(),
        evaluated_at=-1,
        judged_at=-1,
        evaluation_checked_at=state.step,
        posted=(),
        cancelled=(),
        closed=(),
    )
    first_snapshot = snapshot(began, parts, f"branch {branch.name}")
    return replace(first_snapshot, facts=msgspec.structs.replace(first_snapshot.facts, line=[]))


def _fill(
    run: RunDir, trunk: str, branch: Branch, first: str, parts: Components, history: History
) -> None:
    """Write all but the checkpoint: the config, what the task keeps, and the first event."""
    step = history[-1].step
    changes = branch.changes(step)
    place = {"name": f"{parts.config.name}.{branch.name}", "resume": "never"}
    # operations of the history are no values of the file, which a resume would set again
    began = {key: value for key, value, _ in overrides(history)}
    config = with_values(parts.initial.config, began | place | {"record.run_dir": None})
    run.logs.mkdir()
    for name, file in parts.task.spec.run_files.items():
        atomic.write_synced(run.path / name, file.read_bytes())
    recorder = Recorder(run.events)
    recorder.write(
        Branched(
            name=branch.name,
            parent=trunk,
            step=step,
            checkpoint=first,
            iters=branch.iters,
            decay=branch.decay,
        )
    )
    recorder.close()
    origins = dict.fromkeys(changes, f"branch {branch.name}")
    atomic.write_synced(run.config, config_text(config, origins).encode())


def _check_existing(
    folder: Path, trunk: Path, history: History, parts: Components, change: Change
) -> None:
    """Raise ValueError unless a folder is this branch; warn if it is of another course of the run."""
    name = change.operation.value
    if folder.is_symlink():
        raise ValueError(f"{folder} is a symbolic link, which is not followed; move it away")
    events = read_events(RunDir(folder).events) if RunDir(folder).events.is_file() else iter(())
    began = next(events, None)
    if not isinstance(began, Branched) or (began.parent, began.name) != (trunk.name, name):
        raise ValueError(f"{folder} exists and is not the branch {name} of this run; move it away")
    try:
        history_on_disk = read_manifest(latest_checkpoint(folder)).history[: len(history)]
    except CheckpointError:
        return
    if history_on_disk != msgspec.to_builtins(history_to_json(history)):
        parts.logger.warn(
            f"{folder} is the branch of an earlier course of this run, and stays as it is; to make it "
            "again, move it away and resume from a checkpoint before it",
            change.step,
        )


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
    names_here: list[str] = []
    with raise_on_all_ranks(parts.world, "looking for branches"):
        if parts.world.is_main:
            published_branches = [
                read_branch(change.operation)
                for change in effective_changes(state.history)
                if change.operation.name == BRANCH
            ]
            branch_names = [branch.name for branch in published_branches]
            for entry in parts.entries:
                if entry.operation.name == BRANCH and entry.operation.value not in branch_names:
                    parts.logger.console.warn(f"the branch {entry.operation.value} never began")
            names_here = [
                branch.name
                for branch in published_branches
                if branch.train and _is_left(branch.name, root, parts)
            ]
    names = cast("list[str]", agree(parts.world, list(names_here)))
    branches = []
    with raise_on_all_ranks(parts.world, "reading the configs of branches"):
        for name in names:
            folder = branch_folder(root, name)
            # as the trunk's is written: absolute, or relative to the working directory
            run = RunDir(folder if root.is_absolute() else root.parent / folder.name)
            # the code of the task is the trunk's: what the file names is not imported before this is known
            task = load_run_config(str(run.config), import_task=False).config.task
            if task != parts.config.task:
                raise ConfigError.of(
                    f"task is {task}, and that of its trunk {parts.config.task}",
                    where=str(run.config),
                )
            branches.append((run, load_run_config(str(run.config), resuming=True)))
    return branches


def _is_left(name: str, root: Path, parts: Components) -> bool:
    run = RunDir(branch_folder(root, name))
    if run.path.is_symlink():
        raise ConfigError.of("a symbolic link, which is not followed", where=str(run.path))
    if not run.holds_run():
        parts.logger.console.warn(f"the branch {name} is gone: there is no run in {run.path}")
        return False
    summary = cached_summary(run)
    status = run_status(run, summary.events, summary.seen or 0.0)
    if status.state == "running":
        by = f" by process {status.process}" if status.process else ""
        parts.logger.console.warn(f"the branch {name} is being trained{by}, and is left to it")
    return status.state in ("stopped", "crashed")
