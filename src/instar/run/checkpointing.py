"""Checkpoints of a run: their contents, when one is saved, and which are pointed at as the best."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from instar.checkpoint.listing import list_checkpoints, pointer_target, update_pointer
from instar.checkpoint.manifest import (
    COMPONENTS,
    CheckpointError,
    Facts,
    RunStart,
    is_on_line,
    read_manifest,
)
from instar.checkpoint.tensor_file import rows_to_save
from instar.config.fields import checkpoint_values
from instar.config.schema import CheckpointConfig
from instar.distributed.agree import raise_on_all_ranks
from instar.models.module import persistent_buffers
from instar.record.control import REQUESTED
from instar.record.format import interval_text
from instar.run.components import Components
from instar.run.output.extension import barrier_of
from instar.run.output.save import Snapshot
from instar.run.resume import rewind_step
from instar.run.state.early_stopping import RuleState
from instar.run.state.generators import generator_states
from instar.run.state.run_state import Interval, RunState
from instar.run.state.sync_point import SaveRequest
from instar.schedule.operations import history_to_json
from instar.tasks.basis import digest

LEFT_OUT = {
    "optimizer": COMPONENTS["optimizer"].effect_if_missing,
    "scheduler": "the learning rate schedule starts again, with its warm-up",
    "dataset": "the data start again at the first sample: samples are repeated",
    "rng": COMPONENTS["rng"].effect_if_missing,
}
"""Consequence of each part of the state that a config may leave out."""


def best_is_now(state: RunState, parts: Components) -> tuple[str, ...]:
    """Return the metrics whose best value so far is that of the current weights."""
    is_current = state.judged_at == state.step
    return parts.tracker.best_at(state.metrics, state.step) if is_current else ()


def snapshot(state: RunState, parts: Components, reason: str) -> Snapshot:
    """Return everything to save after a step; tensors are not copied. A collective."""
    stepper, progress, config = parts.stepper, state.progress, parts.config.checkpoint
    without = [part for part in LEFT_OUT if not getattr(config, f"save_{part}_state")]
    model = stepper.unwrapped_model
    # a buffer may be a view of a parameter, and the file format has no views
    copies = {name: buffer.clone() for name, buffer in persistent_buffers(model).items()}
    weights = {name: parameter.detach() for name, parameter in stepper.parameters.items()}
    components = {"model": {**weights, **copies}}
    if "optimizer" not in without:
        components["optimizer"] = stepper.states()
    if stepper.ema is not None:
        components["ema"] = stepper.ema
    if "rng" not in without:
        components["rng"] = generator_states(parts.world.device)
    is_evaluated = state.evaluated_at == progress.step
    return Snapshot(
        progress=progress,
        components={
            component: {name: rows_to_save(tensor) for name, tensor in tensors.items()}
            for component, tensors in components.items()
        },
        state=state_json(state, parts),
        architecture=parts.task.architecture.to_dict(),
        history=history_to_json(state.history),
        facts=Facts(
            **parts.task.spec.fingerprints,
            progress=dataclasses.asdict(progress),
            loss=state.evaluated_metrics["loss"] if is_evaluated else None,
            metrics=dict(state.evaluated_metrics) if is_evaluated else {},
            basis=digest(state.basis),
            better=dict(parts.config.metrics),
            reason=reason,
            left_out=without,
            buffers=sorted(copies),
            config=checkpoint_values(parts.initial.config),
            line=list(parts.line),
        ),
        best=tuple(parts.tracker.pointers[name] for name in best_is_now(state, parts)),
        request_ids=frozenset(state.request_ids),
    )


def state_json(state: RunState, parts: Components) -> dict[str, object]:
    """Return the contents of state.json. A collective."""
    return {
        **state.to_json(),
        "story": parts.logger.state(),
        "scaler": parts.stepper.scaler.state_dict(),
        "hooks": parts.hooks.state(),
    }


def save_checkpoint(
    state: RunState, parts: Components, reason: str, *, wait: bool = False, must: bool = False
) -> None:
    """Save a checkpoint of this step. A collective.

    Args:
        wait: return only after the checkpoint is on disk.
        must: raise if the save fails, as for the last checkpoint.

    Raises:
        RunFailed, CheckpointError: see `Saver.save`.
    """
    parts.sync.begin(f"saving step {state.step}", state.step)
    parts.hooks.call("on_save_begin", state, parts.stepper, reason=reason)
    parts.stepper.share_buffers()
    barrier = barrier_of(parts.extensions)
    parts.saver.save(snapshot(state, parts, reason), wait=wait, must=must, after=barrier)
    parts.sync.save_requested = SaveRequest.NONE
    if wait or must:
        # a background save may still fail, so a request stays open and is saved after the next step
        parts.sync.answer("save")
    parts.hooks.call("on_save_end", state, parts.stepper, reason=reason)


def save_checkpoint_if_due(state: RunState, parts: Components) -> RunState:
    """Save if due: an interval has ended, rank 0's clock, growth, a new best, or a request.

    A collective.
    """
    parts.saver.poll()
    for extension in parts.extensions:
        extension.after_step(state.progress, parts.stepper.unwrapped_model)
    if state.save_checked_at == state.step:
        return state
    if reasons := reasons_to_save(state, parts):
        # a person is waiting for the save
        wait = parts.sync.save_requested is SaveRequest.PERSON
        save_checkpoint(state, parts, ", ".join(reasons), wait=wait)
    return replace(state, save_checked_at=state.step)


def reasons_to_save(state: RunState, parts: Components) -> list[str]:
    """Return why a checkpoint of this step is due; the same on all ranks."""
    config, request = parts.config.checkpoint, parts.sync.save_requested
    reasons = [text for every, text in intervals(config) if state.due(every)]
    if config.on_growth and state.grown_at == state.step:
        reasons.append("after growth")
    if config.on_best and best_is_now(state, parts):
        reasons.append("best so far")
    if request is SaveRequest.PERSON:
        reasons.append(REQUESTED)
    elif request is SaveRequest.CLOCK:
        reasons.append(f"every {config.every_minutes:g} min")
    return reasons


def finish_extensions(state: RunState, parts: Components) -> None:
    """Let extensions write what is last, such as a delta, before the last checkpoint. A collective.

    Raises:
        CheckpointError, PeerError: one cannot.
    """
    for extension in parts.extensions:
        with raise_on_all_ranks(parts.world, extension.finishing):
            extension.finish(state.progress, parts.stepper.unwrapped_model)


def intervals(config: CheckpointConfig) -> list[tuple[Interval, str]]:
    """Return the intervals of saves in steps, tokens and epochs, with their descriptions."""
    return [
        (Interval(count, unit), interval_text(count, unit))
        for unit, count in config.intervals.items()
    ]


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
