"""Text of an operation: its event with its changes, and the block in rank 0's log."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from instar.config.fields import values as config_values
from instar.growth.apply import moments_mode
from instar.growth.operators import is_growth
from instar.growth.proof import Proof
from instar.models.architecture import AXES
from instar.models.lora import Lora
from instar.models.shape import Growable, count_parameters, streams_of
from instar.record.events import OperationEvent
from instar.record.format import si
from instar.schedule.config_operations import changed_config
from instar.schedule.operations import Change, State
from instar.schedule.settings import mixture_names

Differences = Mapping[str, tuple[Any, Any]]

_BOOKKEEPING = ("interval_factor", "unscaled_intervals", "new_param_warmups")
"""settings that only say how others came about, or what the operation's option says"""
_UNTOLD = ("mask", "layer_types")
"""too long for a line"""

_MEMORY = {
    "asymmetric": "optimizer mapped",
    "mapped": "optimizer mapped, copies alike",
    "reset": "optimizer reset",
}
"""Effect of an operation on the optimizer's state, in words."""


@dataclass(frozen=True)
class ChangeOutcome:
    """What an operation between two steps has changed, for the log."""

    change: Change
    before: State
    after: State
    seconds: float
    proof: Proof | None = None
    """of an operation on the model"""
    folder: Path | None = None
    """of a branch"""

    @cached_property
    def differences(self) -> Differences:
        return differences(self.before, self.after)


def differences(before: State, after: State) -> Differences:
    """Return the settings and parts of the architecture that differ, as (before, after) by name."""
    pairs: tuple[tuple[Any, Any], ...] = (
        (before.settings, after.settings),
        (before.architecture, after.architecture),
    )
    values = {}
    for old, new in pairs:
        was, now = dict(_values(old)), dict(_values(new))
        for name in {**was, **now}:
            if name not in _BOOKKEEPING and was.get(name) != now.get(name):
                values[name] = was.get(name), now.get(name)
    if values.pop("mixture", None) is not None:
        mixtures = (before.settings.mixture, after.settings.mixture)
        for part, weight, new_weight in zip(mixture_names(after.config), *mixtures, strict=True):
            if weight != new_weight:
                values[f"mixture: {part}"] = weight, new_weight
    for key, value in changed_config(before.config, after.config).items():
        values[key.rpartition(".")[2]] = config_values(before.config)[key], value
    return values


def _values(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a dataclass, and of one that holds a config the keys of that."""
    for field in dataclasses.fields(value):
        field_value = getattr(value, field.name)
        yield from (
            field_value.items() if isinstance(field_value, Mapping) else [(field.name, field_value)]
        )


def format_shape(shape: Growable) -> str:
    """Return `12L/768d`: the number of blocks, and of channels of the residual stream."""
    sizes = shape.sizes()
    parts = [f"{sizes['layers']}L"] if "layers" in sizes else []
    parts += [f"{sizes[stream]}d" for stream in streams_of(shape)[:1]]
    return "/".join(parts) or ", ".join(f"{axis} {size}" for axis, size in sizes.items())


def changed_text(changes: Differences) -> str:
    """Return `2048→3072`, with names if several values changed; of a new family its name alone."""
    if "model_type" in changes:
        changes = {"model_type": changes["model_type"]}
    axes = set(AXES.values()) & changes.keys()
    values_to_show = {
        name: pair
        for name, pair in changes.items()
        if (name in axes or name == "batch_size" if axes else name not in _UNTOLD)
    }
    texts = {name: f"{_short(was)}→{_short(now)}" for name, (was, now) in values_to_show.items()}
    if len(texts) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def operation_event(outcome: ChangeOutcome) -> OperationEvent:
    """Return the event of an operation between two steps."""
    change, proof, folder = outcome.change, outcome.proof, outcome.folder
    operation, changes = change.operation, outcome.differences
    notes, proof_values = list[str](), dict[str, float]()
    grows = is_growth(operation.name)
    if proof is not None:
        sizes = [
            count_parameters(state.architecture).total for state in (outcome.before, outcome.after)
        ]
        notes = ["→".join(map(si, sizes)), _MEMORY[moments_mode(operation)]]
        if not grows:
            notes = ["optimizer and moving average as before"]
        proof_values = {
            "max_logit_diff": proof.max_logit_diff,
            "max_logit_diff_relative": proof.max_logit_diff_relative,
            "delta_loss": proof.delta_loss,
            "parameters_before": sizes[0],
            "parameters_after": sizes[1],
        }
    elif not changes and folder is None:
        notes = ["nothing changes"]
    return OperationEvent(
        step=change.step,
        name=operation.name,
        value=operation.value,
        verb="GROW" if grows else "SET",
        change=changed_text(changes) if folder is None else str(folder.name),
        reason=change.reason,
        notes=tuple(notes),
        preserves=proof.label if proof else "",
        proof=proof_values,
        seconds=outcome.seconds,
        architecture=dict(outcome.after.architecture.to_dict()) if grows else {},
        id=change.id,
        by=change.by,
    )


def log_block(outcome: ChangeOutcome, loss: float | None, *, ddp: bool) -> str:
    """Return the log lines of an operation, in the format that existing log parsers expect."""
    change, changes, proof = outcome.change, outcome.differences, outcome.proof
    value = "" if change.operation.value is None else f" {change.operation.value}"
    lines = [
        f"=== SCALING OPERATION TRIGGERED{' (DDP SYNC)' * ddp} ===",
        f"Operation: {change.operation.name}{value}",
        f"Trigger reason: {change.reason}",
        f"Current val loss: {'not evaluated here' if loss is None else f'{loss:.4f}'}",
        *(f"{name}: {_short(was)} -> {_short(now)}" for name, (was, now) in changes.items()),
        *([] if proof is None else [f"Proof: {format_proof(proof)}"]),
        "=== SCALING OPERATION COMPLETE ===",
    ]
    return "\n".join(lines)


def format_proof(proof: Proof) -> str:
    """Return `exact, max|Δlogit| 2.1e-06 (relative 4.0e-07), Δloss -1.2e-08: holds`."""
    return (
        f"{proof.label}, max|Δlogit| {proof.max_logit_diff:.1e} "
        f"(relative {proof.max_logit_diff_relative:.1e}), Δloss {proof.delta_loss:.1e}: "
        f"{'holds' if proof.holds else 'does not hold'}"
    )


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return ", ".join(map(_short, value)) or "none"
    if isinstance(value, Lora):
        return f"{value.target} r={value.rank} α={value.alpha:g}"
    return "none" if value is None else str(value)
