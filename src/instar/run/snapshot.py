"""A run's state at one moment: taken to be saved, and taken up again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from typing import TYPE_CHECKING

from instar.checkpoint.header import read_header
from instar.checkpoint.manifest import CheckpointError, Facts, encode_json
from instar.checkpoint.patterns import COMPONENTS
from instar.checkpoint.store import Checkpoint
from instar.config.operation import Operation
from instar.config.schema import CheckpointConfig
from instar.run.changes import carry_out, loss_of_now
from instar.run.generators import generator_states, restore_generators, seed_generators
from instar.run.saving import Snapshot
from instar.run.state import (
    copy_tensors,
    history_from_json,
    history_to_json,
    load_optimizer_tensors,
    optimizer_tensors,
)
from instar.schedule.operations import fold

if TYPE_CHECKING:
    import torch

    from instar.run.trainer import Trainer

MODEL = COMPONENTS["model"].file()

LEFT_OUT = {
    "optimizer": COMPONENTS["optimizer"].lost,
    "scheduler": "the learning rate's course begins again, with its warm-up",
    "dataset": "the data begin again at the first sample: what was seen will be seen again",
    "rng": COMPONENTS["rng"].lost,
}
"""What going on costs, for each part of the state that a config may leave out."""


def left_out(config: CheckpointConfig) -> list[str]:
    """The parts of the state that the config says not to save."""
    return [part for part in LEFT_OUT if not getattr(config, f"save_{part}_state")]


def snapshot(trainer: Trainer, reason: str) -> Snapshot:
    """The run as it is after a step. The tensors are the live ones."""
    stepper, progress = trainer.stepper, trainer.progress
    without = left_out(trainer.config.checkpoint)
    components = {"model": {name: p.detach() for name, p in stepper.parameters.items()}}
    if "optimizer" not in without:
        components["optimizer"] = optimizer_tensors(stepper.optimizers, stepper.parameters)
    if stepper.ema is not None:
        components["ema"] = stepper.ema
    if "rng" not in without:
        components["rng"] = generator_states(trainer.world.device)
    return Snapshot(
        progress=progress,
        components=components,
        state=trainer.state(),
        architecture=dict(trainer.task.describe()),
        history=history_to_json(trainer.history),
        facts=Facts(
            **trainer.task.fingerprints(),
            progress=dataclasses.asdict(progress),
            loss=loss_of_now(trainer) if trainer.evaluated_at == progress.step else None,
            reason=reason,
            left_out=without,
        ),
        best=tuple(trainer.judge.pointers[name] for name in trainer.best_is_now),
    )


def take_up(trainer: Trainer, checkpoint: Checkpoint, *, allow: Collection[str] = ()) -> list[str]:
    """Give a new trainer everything a checkpoint holds, so that no later step can tell.

    Args:
        allow: what may be another than it was: architecture (as far as every tensor keeps its
            shape), data, tokenizer.

    Returns:
        what was left out of the checkpoint, and what that costs, for the person to read.

    Raises:
        CheckpointError: it is of another model or of other data, or a component is missing.
    """
    _check_identity(trainer, checkpoint, allow)
    try:
        return _take_up(trainer, checkpoint)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # whole by its checksums, and still not what a run leaves
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{checkpoint.path}: not the state of a run: {what}") from error


def _take_up(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    without = checkpoint.manifest.left_out
    history = history_from_json(checkpoint.manifest.history)
    # both build the shape that the history has led to
    if state := dict(checkpoint.state):
        if "dataset" in without:
            state["progress"] = {**state["progress"], "samples": 0}
        trainer.restore(state, history)
    else:
        # an imported one, perhaps grown since: its run is about to begin
        trainer.follow(history)
    stepper, world = trainer.stepper, trainer.world
    copy_tensors(stepper.parameters, _component(checkpoint, "model"))
    if "optimizer" not in without:
        load_optimizer_tensors(
            stepper.optimizers, stepper.parameters, _component(checkpoint, "optimizer")
        )
    if stepper.ema is not None:
        kept = "ema" if "ema" in checkpoint.components else "model"
        copy_tensors(stepper.ema, checkpoint.tensors(kept))
    if "scheduler" in without:
        carry_out(trainer, Operation("reset_lr_schedule"), reason="its state was not saved")
    if "rng" not in without and checkpoint.manifest.world_size == world.size:
        restore_generators(checkpoint.tensors("rng", rank=world.rank), world.device)
    else:
        # of no use to another number of ranks
        seed_generators(trainer.config.seed, trainer.progress.step, world.rank)
    return [
        f"{checkpoint.path.name} was saved without its {p} state: {LEFT_OUT[p]}" for p in without
    ]


def _check_identity(trainer: Trainer, checkpoint: Checkpoint, allow: Collection[str]) -> None:
    _check_architecture(trainer, checkpoint, allow)
    saved = checkpoint.manifest
    for name, fingerprint in trainer.task.fingerprints().items():
        was = getattr(saved, name)
        if was and was != fingerprint and name not in allow:
            raise CheckpointError(
                f"{checkpoint.path}: trained with another {name} (fingerprint {was[:12]}) than the "
                f"config names now ({fingerprint[:12]}); to go on all the same: --allow {name}"
            )


def _check_architecture(trainer: Trainer, checkpoint: Checkpoint, allow: Collection[str]) -> None:
    """What was saved must be what the config and the history come to; where it may be another
    architecture, its tensors must still be those."""
    try:
        history = history_from_json(checkpoint.manifest.history)
        now = fold(trainer.config, trainer.initial.architecture, history).architecture
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path}: of another architecture: {error}") from error
    was, is_now = checkpoint.manifest.architecture, json.loads(encode_json(now.to_dict()))
    if was == is_now:
        return
    saved = {name: entry.shape for name, entry in read_header(checkpoint.path / MODEL).items()}
    fits = saved == {name: entry.shape for name, entry in now.parameters().items()}
    if fits and "architecture" in allow:
        return
    what = ", ".join(
        f"{key} {was.get(key)} → {is_now.get(key)}"
        for key in sorted({**was, **is_now})
        if was.get(key) != is_now.get(key)
    )
    may = "; to go on: --allow architecture" if fits else ""
    raise CheckpointError(
        f"{checkpoint.path}: of another architecture than the config's: {what}{may}"
    )


def _component(checkpoint: Checkpoint, name: str) -> dict[str, torch.Tensor]:
    if name not in checkpoint.components:
        raise CheckpointError(
            f"{checkpoint.path}: its {name} is missing; go on from another one: instar checkpoint "
            f"list {checkpoint.path.parent.parent}"
        )
    return checkpoint.tensors(name)
