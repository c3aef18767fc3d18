"""The pointers to a run's best checkpoints, when it is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from instar.checkpoint.line import is_on_line
from instar.checkpoint.listing import list_checkpoints, pointer_target, update_pointer
from instar.checkpoint.manifest import CheckpointError, RunStart, read_manifest
from instar.distributed.agree import raise_on_all_ranks
from instar.run.loop.checkpointing import best_is_now
from instar.run.loop.components import Components
from instar.run.origin.resume import rewind_step
from instar.run.state.early_stopping import RuleState
from instar.run.state.run_state import RunState


def update_best_pointers(state: RunState, parts: Components, start: Path) -> None:
    """Update the best pointers at a resume. A collective.

    A run may have ended between a save and the update of its pointers. A pointer to a checkpoint on
    a branch, to none, or to another than that with the best value is set to the best checkpoint of
    this line, or removed if that was deleted.
    """
    root, line = parts.saver.root, parts.line
    with raise_on_all_ranks(parts.world, "naming the best checkpoint"):
        if not parts.world.is_main:
            return
        current_best = best_is_now(state, parts)
        for metric, pointer in parts.tracker.pointers.items():
            if metric in current_best:
                update_pointer(root, pointer, start)
                continue
            best_path = pointer_target(root, pointer)
            best = state.metrics.best.get(metric, RuleState())
            if (
                best_path is not None
                and rewind_step(best_path, line) is None
                and _may_be(best_path, metric, best)
            ):
                continue
            best_checkpoint = _with_best(root, metric, best, line)
            if best_checkpoint is not None:
                update_pointer(root, pointer, best_checkpoint)
            else:
                (root / "checkpoints" / pointer).unlink(missing_ok=True)


def _may_be(path: Path, metric: str, best: RuleState) -> bool:
    """Return whether a checkpoint may be the one with the best value: another may have taken the name of one
    that was deleted."""
    with suppress(CheckpointError):
        manifest = read_manifest(path)
        return manifest.step != best.best_step or manifest.metrics.get(metric) == best.best
    return True


def _with_best(root: Path, metric: str, best: RuleState, line: Sequence[RunStart]) -> Path | None:
    """Return the newest checkpoint on a line that has the best value of a metric."""
    for path in reversed(list_checkpoints(root)):
        with suppress(CheckpointError):
            manifest = read_manifest(path)
            evaluation = (manifest.step, manifest.metrics.get(metric))
            if evaluation == (best.best_step, best.best) and is_on_line(manifest, line):
                return path
    return None
