"""Growth on disk, of a run's checkpoint or of a folder of transformers: what the engine grows there, and what it returns."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import torch
from torch import Tensor

from instar.config.errors import ConfigError, InstarError
from instar.config.sections import Operation
from instar.growth.apply import STAY_EQUAL, GrowthStep, Read, TensorReader, copies_stay_equal
from instar.growth.engine import GrownPart, prepare_candidate
from instar.growth.peers import Alone
from instar.growth.plan import GrowthPlan, Label
from instar.growth.proof import NotFiniteError, Probe, Proof, differing
from instar.models.shape import Growable, count_parameters
from instar.record.format import si

C = TypeVar("C")


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
class PlannedGrowth:
    """Operations on a model, as they are planned."""

    steps: tuple[GrowthStep, ...]
    """growth steps, in order"""
    stages: tuple[GrowthStage, ...]
    shapes: tuple[Growable, ...]
    """shape after each growth step"""


@dataclass(frozen=True)
class OfflineGrowth:
    """Result of `grow`."""

    path: Path
    parameters_before: int
    stages: tuple[GrowthStage, ...]
    proof: Proof | None
    seconds: float
    warning: str = ""
    """about adapters that cannot learn, copies that stay as they are, and what was not compared; empty: nothing"""
    checked_on: str = ""
    """samples of the proof, in words"""

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "path": str(self.path)}

    def lines(self) -> Iterator[str]:
        """Yield one line per operation, its effect and the model's new size, then what was proved and where it is."""
        before = self.parameters_before
        for stage in self.stages:
            value = "" if stage.operation.value is None else f" {json.dumps(stage.operation.value)}"
            size = f"{si(before)} → {si(stage.parameters)}" if stage.label else ""
            words = [f"{stage.operation.name}{value}", size, stage.label or "", *stage.notes]
            yield "  ".join(filter(None, words))
            before = stage.parameters
        if self.proof is not None:
            what = "logit" if self.checked_on == "random tokens" else "output"
            change = (
                f"max |Δ{what}| {self.proof.max_logit_diff:.2g}, Δloss {self.proof.delta_loss:+.2g}"
            )
            yield f"checked on {self.checked_on}: {change}: {self.proof.label}"
        if self.warning:
            yield f"warning: {self.warning}"
        yield f"{self.path}, in {self.seconds:.1f} s"


def stage(operation: Operation, plan: GrowthPlan | None, larger: Growable) -> GrowthStage:
    """Return the stage of an operation; without a plan, of one on settings."""
    size = count_parameters(larger).total
    if plan is None:
        return GrowthStage(operation, None, None, (), size)
    return GrowthStage(operation, plan.label, plan.bound_nats, plan.notes, size)


def copies_warning(growth: PlannedGrowth, states: Mapping[str, Tensor]) -> str:
    """Return a warning about operations whose copies never become different; empty if there are none.

    Args:
        states: of the optimizer before all operations, named ``<parameter>/<state>``; only their shapes are used.
    """
    kept_states = {} if any(step.mode == "reset" for step in growth.steps) else states
    stages = [stage for stage in growth.stages if stage.label is not None]
    names = [
        stage.operation.name
        for step, stage in zip(growth.steps, stages, strict=True)
        if copies_stay_equal(step.plan, kept_states, step.mode)
    ]
    return f"the copies that {' and '.join(names)} made {STAY_EQUAL}" if names else ""


@contextmanager
def as_config_error() -> Iterator[None]:
    """Context manager: turns the ValueError of an impossible operation into a ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError.of(str(error), where="--op") from error


def expected_plan(stages: Sequence[GrowthStage]) -> GrowthPlan:
    """Return an empty plan with the weakest label; if bounded, with the sum of the bounds."""
    labels = [stage.label for stage in stages if stage.label is not None]
    weakest: Label = max(labels, key=get_args(Label).index, default="exact")
    bound_nats = sum(stage.bound_nats or 0.0 for stage in stages)
    return GrowthPlan({}, weakest, bound_nats if weakest == "bounded" else None)


@dataclass(frozen=True)
class DiskGrowth(Generic[C]):
    """Files that grow into new ones beside them, one tensor at a time: a `GrowthSubject`.

    What was written takes the old one's place when its folder is published, which the caller does.
    """

    plan: PlannedGrowth
    out: Path
    """that is to be made, for messages"""
    checked_on: str
    """on what outputs are compared, in words"""
    build: Callable[[], C]
    """writes the grown files, and returns them"""
    outputs: Callable[[C], tuple[Probe, Probe]]
    """of both models, loaded from their files, as exact as their tensors"""
    readers: Callable[[C], Iterable[tuple[Read, TensorReader]]]
    """yields readers of the tensors in the files, and of these as they are made again"""
    dtypes: Callable[[C], Collection[torch.dtype]] = lambda _: {torch.float32}
    """of the tensors, as far as outputs are not more exact"""
    tensors: Callable[[C], Mapping[str, Tensor]] = lambda _: {}
    """none is in memory"""
    in_double: Callable[[C], None] = lambda _: None
    """only the rounding of the files is left in `outputs`"""

    @property
    def name(self) -> str:
        return ", ".join(stage.operation.name for stage in self.plan.stages)

    def parts(self, candidate: C) -> Sequence[GrownPart]:
        return [GrownPart(lambda _: self._verify(candidate), lambda: None)]

    def _verify(self, candidate: C) -> None:
        """Raise NotProven unless the files have the tensors that were to be written, bit for bit."""
        for read, expected_tensors in self.readers(candidate):
            for name in expected_tensors.outlines:
                tensor, expected = read(name), expected_tensors.read(name)
                same = tensor.shape == expected.shape and not differing(tensor, expected, None)
                if not same or tensor.dtype != expected.dtype:
                    raise NotProven(
                        f"{name} in the written files is not the tensor that was made; {self.out} was not made: "
                        "check the disk"
                    )

    def broken(self, proof: Proof) -> Exception:
        return NotProven(
            f"{self.name}: not {proof.label}: outputs moved by {proof.max_logit_diff:.3g} "
            f"({proof.max_logit_diff_relative:.1g} of the largest), the loss on {self.checked_on} "
            f"by {proof.delta_loss:+.3g}; {self.out} was not made"
        )


def write_and_prove(growth: DiskGrowth[C], *, check: bool) -> tuple[C, Proof | None]:
    """Write grown files, and with `check` prove them: outputs, and every tensor.

    Raises:
        NotProven: a label does not hold, or a file is not what was to be written.
    """
    if not check:
        return growth.build(), None
    try:
        candidate_growth = prepare_candidate(growth, expected_plan(growth.plan.stages), Alone())
    except NotFiniteError as error:
        raise NotProven(f"{error}; nothing was made") from error
    return candidate_growth.candidate, candidate_growth.proof
