"""What growth on disk returns: of a run's checkpoint, or of a folder of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from instar.config.errors import ConfigError, InstarError
from instar.config.sections import Operation
from instar.growth.apply import Read, TensorReader
from instar.growth.plan import GrowthError, GrowthPlan, Label
from instar.growth.proof import Probe, Proof, differing, prove
from instar.models.shape import Growable, count_parameters


class NotProven(InstarError):  # noqa: N818
    """An operation changed the function more than its label allows; nothing was written."""


@dataclass(frozen=True)
class GrowthStage:
    """An operation and its effect on the model."""

    operation: Operation
    label: Label | None
    """None: an operation on settings"""
    bound_nats: float | None
    notes: tuple[str, ...]
    parameters: int
    """number of parameters after the operation"""


@dataclass(frozen=True)
class OfflineGrowth:
    """Result of `grow`."""

    path: Path
    parameters_before: int
    stages: tuple[GrowthStage, ...]
    proof: Proof | None
    seconds: float
    warning: str = ""
    """about adapters that cannot learn; empty if there are none"""
    checked_on: str = ""
    """samples of the proof, in words"""

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "path": str(self.path)}


def stage(operation: Operation, plan: GrowthPlan | None, grown: Growable) -> GrowthStage:
    """Returns the stage of an operation; without a plan, of one on settings."""
    size = count_parameters(grown).total
    if plan is None:
        return GrowthStage(operation, None, None, (), size)
    return GrowthStage(operation, plan.label, plan.bound_nats, plan.notes, size)


@contextmanager
def as_config_error() -> Iterator[None]:
    """Context manager: turns the ValueError of an impossible operation into a ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError.one(str(error), where="--op") from error


def expected_plan(stages: Sequence[GrowthStage]) -> GrowthPlan:
    """Returns an empty plan with the weakest label; if bounded, with the sum of the bounds."""
    labels = [stage.label for stage in stages if stage.label is not None]
    weakest: Label = max(labels, key=get_args(Label).index, default="exact")
    bound = sum(stage.bound_nats or 0.0 for stage in stages)
    return GrowthPlan({}, weakest, bound if weakest == "bounded" else None)


def prove_offline(
    expected: GrowthPlan, probed: Callable[[], tuple[Probe, Probe]], dtypes: Collection[torch.dtype]
) -> Proof:
    """Returns the proof of models on disk; arguments are those of `prove`.

    Raises:
        NotProven: outputs are not finite.
    """
    try:
        return prove(expected, probed, dtypes)
    except GrowthError as error:
        raise NotProven(f"{error}; nothing was made") from error


def check_proof(proof: Proof, stages: Sequence[GrowthStage], out: Path, checked_on: str) -> None:
    """Raises NotProven unless the labels hold."""
    if not proof.holds:
        names = ", ".join(stage.operation.name for stage in stages)
        raise NotProven(
            f"{names}: not {proof.label}: outputs moved by {proof.max_logit_diff:.3g} "
            f"({proof.max_logit_diff_relative:.1g} of the largest), the loss on {checked_on} "
            f"by {proof.delta_loss:+.3g}; {out} was not made"
        )


def verify_written(written: Read, grown: TensorReader, out: Path) -> None:
    """Raises NotProven unless files have the tensors that were to be written, bit for bit.

    Args:
        written: returns a tensor of the files.
        grown: makes it again.
    """
    for name in grown.outlines:
        tensor, expected = written(name), grown.read(name)
        same = tensor.shape == expected.shape and not differing(tensor, expected, None)
        if not same or tensor.dtype != expected.dtype:
            raise NotProven(
                f"{name} in the written files is not the tensor that was made; {out} was not made: check the disk"
            )
