"""Gives a new run its values: those of the weights that it starts from, or all of a checkpoint.

After a restored checkpoint, later steps are the same as without the interruption."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import Module

from instar.checkpoint.layout import ComponentReader, Parts, check_shapes
from instar.checkpoint.manifest import CheckpointError, encode_json
from instar.checkpoint.store import Checkpoint, check_finite, load_checkpoint
from instar.config.fields import LANGUAGE
from instar.config.origins import SCHEDULE
from instar.config.sections import Operation
from instar.distributed.agree import raise_on_all_ranks
from instar.distributed.shards import full_tensor
from instar.models.architecture import Architecture
from instar.models.hf.peft import open_adapter
from instar.models.hf.pretrained import LoraShape
from instar.models.hf.pretrained_folder import open_folder
from instar.models.hf.tensors import from_tensors, merge_adapters
from instar.models.hf.weights import read_weights
from instar.models.lora import is_adapter
from instar.models.module import empty_buffers, load_buffers, persistent_buffers
from instar.run.changes.scheduled import carry_out
from instar.run.checkpointing import LEFT_OUT
from instar.run.components import Components
from instar.run.init_weights import Weights
from instar.run.optimizer import copy_tensors, parameter_of
from instar.run.parallel.choose import build_meta_model
from instar.run.state.data_phase import begins_phase
from instar.run.state.generators import restore_generators, seed_generators
from instar.run.state.gradient_stats import dead_ranks
from instar.run.state.run_state import RunState
from instar.run.step.stepper import build_stepper, freeze_parameters
from instar.schedule.operations import (
    RESTART_LR,
    Change,
    History,
    carried_out,
    fold_history,
    history_from_json,
    states,
)
from instar.schedule.settings import Settings
from instar.tasks.task import Task

_POSITIONS = "position_embedding.weight"


def restore(
    state: RunState,
    parts: Components,
    checkpoint: Checkpoint,
    *,
    override: Operation | None = None,
    allow: Collection[str] = (),
) -> tuple[RunState, list[str]]:
    """Restore everything in a checkpoint into a new run. A collective.

    Args:
        state: at step 0.
        override: settings that the resume changes; appended to the history.
        allow: what may have changed: architecture (if every tensor keeps its shape), data,
            tokenizer.

    Returns:
        the state, and warnings: parts left out of the checkpoint and their consequences, buffers
        that differ, adapters that cannot learn.

    Raises:
        CheckpointError: the checkpoint is of another model or of other data, or lacks a component.
    """
    history = _history(checkpoint)
    _check_architecture(parts, checkpoint, history, override, allow)
    _check_data(parts, checkpoint, allow)
    try:
        state, warnings = _restore(state, parts, checkpoint, history, override)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # intact by its checksums, and still not a state that a run saves
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{checkpoint.path}: not the state of a run: {what}") from error
    if override is not None and SCHEDULE in override.value and state.cancelled:
        numbers = ", ".join(str(entry.number) for entry in state.cancelled)
        warnings.append(
            f"the schedule is another from now on: that people cancelled entry {numbers} of the one before no "
            "longer counts"
        )
        state = state.under_another_schedule()
    return state, warnings


def restore_state(
    state: RunState,
    parts: Components,
    saved_state: Mapping[str, Any],
    history: History,
    override: Operation | None = None,
) -> RunState:
    """Restore the state from a state.json, and build the model after the history and `override`. A collective.

    The caller must load the model's weights.

    Raises:
        LookupError, TypeError, ValueError: `saved_state` is not the contents of a state.json.
    """
    state = replay_history(state, parts, history, has_course="course" in saved_state)
    replayed = state.phase
    state = RunState.from_json(saved_state, state.in_force, state.phase, history)
    if state.phase.mixture != replayed.mixture:
        parts.read(state.phase)
    state = _set_at_resume(state, parts, override)
    parts.logger.epochs = state.phase.epochs
    # empty if the run was not fp16 until now: then the scaler starts with its defaults
    if scaler := saved_state["scaler"]:
        parts.stepper.scaler.load_state_dict(scaler)
    parts.logger.restore(saved_state["story"], state.progress)
    return state


def replay_history(
    state: RunState, parts: Components, history: History, *, has_course: bool = False
) -> RunState:
    """Fold a history; build the model and open the data after it (law 1). A collective.

    Args:
        state: before `history`, with the components that belong to it: at step 0, or where a resume changes settings.
        has_course: the caller restores the epoch lengths of earlier phases, so only the data of the
            last phase are opened.
    """
    before, now, task, phase = state.in_force, state.in_force, parts.task, state.phase
    phases = list[tuple[Settings, int, Task]]()
    """settings, cursor and task of each phase after the first"""
    for change, after in states(now, history):
        context = after.settings.context
        # keep the same task object: the loader factory reuses the data opened for it
        if (context, after.architecture) != (now.settings.context, now.architecture):
            task = task.at(after.architecture, context)
        if begins_phase(now.settings, after.settings):
            phases.append((after.settings, change.cursor, task))
        now = after
    for number, (settings, cursor, phase_task) in enumerate(phases, start=1):
        if has_course and number < len(phases):
            phase = parts.loaders.passed(phase, settings, cursor)
        else:
            is_here = cursor == state.progress.samples
            last_step = state.before.samples if is_here else None
            phase = parts.loaders.next(phase, phase_task, settings, cursor, last_step)
    # fresh adapters of merge_lora warm up in a model of the same shape
    warmups = now.settings.new_param_warmups
    if now.architecture != before.architecture or warmups != before.settings.new_param_warmups:
        with raise_on_all_ranks(parts.world, "building the model"):
            bare = build_meta_model(parts.config, parts.world, task)
        parts.stepper = build_stepper(parts.config, parts.world, task, bare, now)
    elif now.settings.frozen != before.settings.frozen:
        freeze_parameters(parts.stepper, now.settings.frozen)
    parts.stepper.task = task
    if phase != state.phase:
        parts.read(phase)
    return replace(state, history=(*state.history, *history), in_force=now, phase=phase)


def _set_at_resume(state: RunState, parts: Components, override: Operation | None) -> RunState:
    """Return the state after what the resume changes, if anything. A collective."""
    if override is None:
        return state
    change = Change(override, state.step, state.progress.samples, reason="set at resume")
    after = replay_history(state, parts, (change,))
    return replace(state.with_change(change, after.in_force), phase=after.phase)


def load_model_state(model: Module, checkpoint: Checkpoint) -> list[str]:
    """Load a checkpoint's parameters and persistent buffers into a model.

    Returns:
        warnings about buffers that only the model or only the checkpoint has: earlier versions
        saved none, and a forward pass may register more.

    Raises:
        CheckpointError: the component `model` is missing.
        AttributeError, KeyError, ValueError: the checkpoint is of another model.
    """
    parameters = dict(model.named_parameters())
    with _reading(checkpoint, "model") as read:
        names = read.layout.entries
        buffers = {name: read(name) for name in names if name not in parameters}
        parameter_names = {name: None for name in names if name not in buffers}
        copy_tensors(parameters, Parts(read, parameter_names, parameters.__getitem__))
    buffers_now = persistent_buffers(model)
    later = sorted(buffers.keys() - buffers_now.keys() - set(empty_buffers(model)))
    missing = sorted(buffers_now.keys() - buffers.keys())
    load_buffers(model, buffers)
    warnings = []
    if missing:
        warnings.append(
            f"{checkpoint.path.name} was saved without the buffers {', '.join(missing)}: they have "
            "the initial values of a new module"
        )
    if later:
        warnings.append(
            f"{checkpoint.path.name} has the buffers {', '.join(later)}, which a new module does not "
            "register: they are restored"
        )
    return warnings


def load_average(targets: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """Load a checkpoint's moving average, or its weights if it has none."""
    with _reading(checkpoint, checkpoint.weights) as read:
        names = {name: None for name in read.layout.entries if name in targets}
        copy_tensors(targets, Parts(read, names, targets.__getitem__))


@dataclass(frozen=True)
class OpenedWeights:
    """Values of a new model's parameters, and the checkpoint that its buffers are in, if it has any."""

    tensors: Mapping[str, Tensor]
    """may be read when they are asked for"""
    checkpoint: Checkpoint | None = None

    def load_into(self, model: Module) -> list[str]:
        """Load them into a new model; return warnings about buffers that one of them lacks."""
        parameters = dict(model.named_parameters())
        if self.checkpoint is None:
            copy_tensors(parameters, self.tensors)
            return []
        try:
            warnings = load_model_state(model, self.checkpoint)
            copy_tensors(parameters, {name: self.tensors[name] for name in parameters})
        except (AttributeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{self.checkpoint.path}: of another model: {error}") from error
        return warnings


class _Saved(Mapping[str, Tensor]):
    """The tensors of a component, each read when it is asked for."""

    def __init__(
        self, checkpoint: Checkpoint, component: str, positions: int | None = None
    ) -> None:
        """`positions`: as many rows of the table of positions are read; None: all."""
        self._checkpoint, self._component, self._positions = checkpoint, component, positions
        self._names = list(checkpoint.layout(component).entries)

    def __getitem__(self, name: str) -> Tensor:
        with self._checkpoint.reading(self._component) as read:
            if name == _POSITIONS and self._positions is not None:
                return read.rows(name, 0, self._positions)
            return read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def open_weights(weights: Weights, architecture: Any) -> OpenedWeights:
    """Open weights, of a checkpoint the moving average if it has one, and check them.

    Args:
        architecture: of the new model; of a GPT, it may have a shorter context than the weights.

    Raises:
        CheckpointError: the weights are damaged, of another model than they say, or not finite.
    """
    if weights.task != LANGUAGE and not weights.is_hf:
        checkpoint = load_checkpoint(weights.path)
        return OpenedWeights(_Saved(checkpoint, checkpoint.weights), checkpoint)
    tensors: Mapping[str, Tensor]
    if weights.task == LANGUAGE:
        tensors = _gpt(weights, architecture.context)
    else:
        tensors = _of_folder(weights, architecture)
    check_finite(weights.path, tensors, hint="")
    return OpenedWeights(tensors)


def _of_folder(weights: Weights, architecture: LoraShape) -> dict[str, Tensor]:
    """Return the parameters of a model of transformers, those of its adapters from their own folder."""
    folder, names = open_folder(weights.path), list(architecture.parameters())
    with folder.reading() as read:
        tensors = {name: read(name) for name in names if not is_adapter(name)}
    if weights.adapter is not None:
        with open_adapter(weights.adapter, folder.shape).reading() as read:
            tensors |= {name: read(name) for name in names if is_adapter(name)}
    return {name: tensors[name] for name in names}


def _history(checkpoint: Checkpoint) -> History:
    try:
        return history_from_json(checkpoint.manifest.history)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error


def _restore(
    state: RunState,
    parts: Components,
    checkpoint: Checkpoint,
    history: History,
    override: Operation | None,
) -> tuple[RunState, list[str]]:
    without = checkpoint.manifest.left_out
    # both branches build the shape after the history
    if saved_state := dict(checkpoint.state):
        if "dataset" in without:
            saved_state |= _data_begun_again(saved_state)
        state = restore_state(state, parts, saved_state, history, override)
        hook_warnings = parts.hooks.restore(saved_state.get("hooks", {}))
    else:
        # an imported checkpoint, perhaps grown since: its run starts here
        state = _set_at_resume(replay_history(state, parts, history), parts, override)
        hook_warnings = []
    stepper, world = parts.stepper, parts.world
    parameters = stepper.parameters
    warnings = [*hook_warnings, *load_model_state(stepper.unwrapped_model, checkpoint)]
    if "optimizer" not in without:
        with _reading(checkpoint, "optimizer") as read:
            states = Parts(read, read.layout.entries, lambda n: parameters.get(parameter_of(n)))
            stepper.load_states(states)
    if stepper.ema is not None:
        load_average(stepper.ema, checkpoint)
    if "scheduler" in without:
        state = carry_out(state, parts, RESTART_LR, reason="its state was not saved")
    if "rng" not in without and checkpoint.manifest.world_size == world.size:
        restore_generators(checkpoint.tensors("rng", rank=world.rank), world.device)
    else:
        # saved generator states are per rank: useless for another number of ranks
        seed_generators(parts.config.seed, state.step, world.rank, world.device)
    warnings += [
        f"{checkpoint.path.name} was saved without its {part} state: {LEFT_OUT[part]}"
        for part in without
    ]
    dead = dead_ranks(stepper.parameters, lambda name: full_tensor(stepper.parameters[name]))
    return state, [*warnings, f"{checkpoint.path.name}: {dead}"] if dead else warnings


def _data_begun_again(saved_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a state.json with counters and a data phase that are at the first sample."""
    counters = {
        key: {**saved_state[key], "samples": 0}
        for key in ("progress", "before")
        if key in saved_state
    }
    course = saved_state.get("course")
    if course is None:
        return counters
    course = {**course, "since": 0, "epochs_before": 0.0, "epochs_ended": (0, 0)}
    if mixture := course.get("mixture"):
        course["mixture"] = {**mixture, "drawn": [0] * len(mixture["weights"])}
    return {**counters, "course": course}


def _check_data(parts: Components, checkpoint: Checkpoint, allow: Collection[str]) -> None:
    for name, fingerprint in parts.task.spec.fingerprints.items():
        was = getattr(checkpoint.manifest, name)
        if was and was != fingerprint and name not in allow:
            raise CheckpointError(
                f"{checkpoint.path}: trained with another {name} (fingerprint {was[:12]}) than the "
                f"config names now ({fingerprint[:12]}); to resume anyway: --allow {name}"
            )


def _check_architecture(
    parts: Components,
    checkpoint: Checkpoint,
    history: History,
    override: Operation | None,
    allow: Collection[str],
) -> None:
    """Raise CheckpointError unless the saved architecture is that of config and history, or is
    allowed to differ and has the same tensors."""
    try:
        state = fold_history(parts.initial, history)
        if override is not None:
            state = carried_out(state, override, checkpoint.manifest.step)
        now = state.architecture
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path}: of another architecture: {error}") from error
    was, is_now = checkpoint.manifest.architecture, json.loads(encode_json(now.to_dict()))
    if was == is_now:
        return
    saved_shapes = {name: entry.shape for name, entry in checkpoint.layout("model").entries.items()}
    # buffers are in the file, but not in the table
    fits = all(saved_shapes.get(name) == entry.shape for name, entry in now.parameters().items())
    if fits and "architecture" in allow:
        return
    what = ", ".join(
        f"{key} {was.get(key)} → {is_now.get(key)}"
        for key in sorted({**was, **is_now})
        if was.get(key) != is_now.get(key)
    )
    may = "; to resume anyway: --allow architecture" if fits else ""
    raise CheckpointError(
        f"{checkpoint.path}: of another architecture than the config's: {what}{may}"
    )


def _reading(checkpoint: Checkpoint, name: str) -> AbstractContextManager[ComponentReader]:
    if name not in checkpoint.components:
        raise CheckpointError(
            f"{checkpoint.path}: its {name} is missing; resume from another checkpoint: instar "
            f"checkpoint list {shlex.quote(str(checkpoint.path.parent.parent))}"
        )
    return checkpoint.reading(name)


def _gpt(weights: Weights, context: int) -> Mapping[str, Tensor]:
    """Return the parameters of a GPT without adapters, with as many positions as `context` needs."""
    shape = Architecture.from_dict(weights.architecture)
    if weights.is_hf:
        tensors = from_tensors(shape, read_weights(weights.path))
    else:
        checkpoint = load_checkpoint(weights.path)
        component = checkpoint.weights
        shapes = {name: entry.shape for name, entry in shape.parameters().items()}
        check_shapes(checkpoint.path, checkpoint.layout(component).entries, shapes)
        if not shape.lora:
            return _Saved(checkpoint, component, context)
        tensors = merge_adapters(shape, _Saved(checkpoint, component))
    if _POSITIONS in tensors:
        tensors[_POSITIONS] = tensors[_POSITIONS][:context]
    return tensors
