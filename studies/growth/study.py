"""Runs of studies as data: which arm trains which shape for how long, and which of them share a trunk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from instar.config.language import LanguageConfig
from instar.config.load import load_config
from instar.models.architecture import Architecture, resolve_architecture
from instar.models.cost import flops_per_token
from instar.models.shape import count_parameters
from segments import Segment

WARMUP = 50
"""Steps, of every run."""
FIRST_REST = 0.005
"""Rate of what Muon leaves to AdamW in all runs of the first edition."""


@dataclass(frozen=True)
class Shape:
    """Of a model and its batches. The sizes of a column differ in their number of layers."""

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int
    batch: int

    def architecture(self, layers: int) -> Architecture:
        """One of the sizes, as `settings` asks for it."""
        config = load_config(None, (*self.settings(), f"model.n_layer={layers}")).config
        assert isinstance(config, LanguageConfig)
        return resolve_architecture(config.model, self.vocabulary)

    @property
    def parameters(self) -> int:
        """Of the matrices and gains of all blocks: tables do not count."""
        return count_parameters(self.architecture(self.layers)).non_embedding

    def settings(self) -> tuple[str, ...]:
        """What all sizes have in common."""
        return (
            "model.norm=rmsnorm",
            "model.positions=rope",
            "model.bias=false",
            f"model.n_head={self.heads}",
            "precision=fp32",
            f"model.n_embd={self.width}",
            f"model.context={self.context}",
            f"data.vocab_size={self.vocabulary}",
            f"train.batch_size={self.batch}",
        )


@cache
def flops_per_step(shape: Shape) -> float:
    """Forward and backward."""
    return flops_per_token(shape.architecture(shape.layers)) * shape.batch * shape.context


@dataclass(frozen=True)
class Change:
    """An operation, and what it makes of the shape."""

    share: float
    """of the run's own steps"""
    operation: str
    """its name and value, as in `stack_layers 4`"""
    layers: int
    """after it"""

    def __str__(self) -> str:
        return f"{self.operation.replace(' ', '-')}-at-{self.share:g}"

    def entry(self, steps: int) -> str:
        """In the schedule of a run of so many steps."""
        name, value = self.operation.split()
        return f"{{name: {name}, value: {value}, when: {{at_step: {round(self.share * steps)}}}}}"


@dataclass(frozen=True)
class Arm:
    """A way to train under Muon: a stable rate from a shape to begin with, changes, and a linear decay to zero."""

    shape: Shape
    """at first"""
    rate: float
    """of matrices"""
    decay: float
    """share of the steps"""
    changes: tuple[Change, ...] = ()
    rest: float = FIRST_REST
    """rate of what Muon leaves to AdamW"""
    base_depth: int | None = None
    """`optimizer.lr_base_depth`"""

    def __str__(self) -> str:
        """Runs of the first edition have the names that they had."""
        shape = self.shape
        return "-".join(
            (
                f"muon-{shape.layers}x{shape.width}-b{shape.batch}-r{self.rate:g}-d{self.decay:g}",
                *([f"a{self.rest:g}"] if self.rest != FIRST_REST else []),
                *([f"l{self.base_depth}"] if self.base_depth is not None else []),
                *map(str, self.changes),
            )
        )

    def flops(self, steps: float) -> float:
        """What so many steps cost."""
        shape, start, mean = self.shape, 0.0, 0.0
        for change in self.changes:
            mean += (change.share - start) * flops_per_step(shape)
            shape, start = replace(shape, layers=change.layers), change.share
        return steps * (mean + (1 - start) * flops_per_step(shape))

    def steps(self, flops: float) -> int:
        """Of a run that costs so much."""
        return round(flops / self.flops(1))


@dataclass(frozen=True)
class Run:
    """An arm with a seed and an end."""

    arm: Arm
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.arm}-s{self.seed}-{self.steps}".replace(".", "_")

    @property
    def decays_at(self) -> int:
        return self.steps - round(self.arm.decay * self.steps)

    @property
    def leaves_at(self) -> int:
        """Steps after which it differs from others of the same beginning."""
        first = (round(change.share * self.steps) for change in self.arm.changes[:1])
        return min((self.decays_at, *first))

    @property
    def beginning(self) -> tuple[object, ...]:
        """Runs with the same begin alike."""
        arm = self.arm
        return arm.shape, arm.rate, arm.rest, arm.base_depth, self.seed

    def schedule(self) -> list[str]:
        return [change.entry(self.steps) for change in self.arm.changes]


def segments(runs: Iterable[Run], max_runs: int = 4) -> list[Segment]:
    """One for up to `max_runs` runs of the same beginning: the one that leaves it last, and the others as its branches."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in dict.fromkeys(runs):
        groups.setdefault(run.beginning, []).append(run)
    return [
        _segment(*sorted(group[i : i + max_runs], key=lambda run: (run.leaves_at, run.name)))
        for group in groups.values()
        for i in range(0, len(group), max_runs)
    ]


def _segment(*runs: Run) -> Segment:
    *branches, trunk = runs
    arm = trunk.arm
    schedule = [_branch(run, str(number)) for number, run in enumerate(branches)] + trunk.schedule()
    settings = (
        *arm.shape.settings(),
        f"model.n_layer={arm.shape.layers}",
        f"seed={trunk.seed}",
        "optimizer.name=muon",
        f"optimizer.muon_lr={arm.rate}",
        f"optimizer.lr={arm.rest}",
        *([f"optimizer.lr_base_depth={arm.base_depth}"] if arm.base_depth is not None else []),
        "learning_rate.shape=wsd",
        f"learning_rate.warmup_iters={WARMUP}",
        f"learning_rate.lr_decay_iters={trunk.steps}",
        f"learning_rate.decay_fraction={arm.decay}",
        f"schedule=[{', '.join(schedule)}]",
    )
    ends = tuple((run.name, str(number), run.steps) for number, run in enumerate(branches))
    return Segment(trunk.name, trunk.steps, settings, branches=ends)


def _branch(run: Run, name: str) -> str:
    at, decay = run.leaves_at, run.steps - run.decays_at
    return (
        f'{{name: branch, value: "{name}", when: {{at_step: {at}}}, iters: {run.steps - at}, '
        f"decay: {decay}, schedule: [{', '.join(run.schedule())}]}}"
    )
