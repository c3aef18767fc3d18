"""Candidates of a search: schedules of growth that lead to one final shape, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any

import msgspec

from instar.config.origins import in_yaml
from instar.extensions.lab.pilot_file import MOST, Positive, Spent, Steps, Text
from instar.models.architecture import AXES, Architecture

SCRATCH = "scratch"
"""The candidate that does not grow."""
_FACTORS = (4, 3, 2)
"""Of layers; 8 is beyond what copies make up for."""
_MOMENTS = (0.6, 0.75, 0.9)
"""Of the steps before the rate decays."""
_TWICE = (0.45, 0.9)
_REWARM = 0.05
"""Share of the steps over which the rate of new parameters rises."""

Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,50}\Z")]


class CandidateStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A size on the way to the final one."""

    share: Share
    """Of the steps, before it begins."""
    flops_per_token: Positive
    operations: tuple[dict[Text, Any], ...] = ()
    """That make it of the size before."""


class GrowthCandidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schedule that leads to the final shape."""

    name: Name
    trunk: Name
    """Of the run that all schedules share which begin with this shape."""
    begin: dict[Text, Any]
    """Keys of the config that give the first shape in place of the final one."""
    parameters: Steps
    """Of the first shape."""
    stages: Annotated[tuple[CandidateStage, ...], msgspec.Meta(min_length=1, max_length=MOST)]
    rewarm: Share = 0.0
    """Share of the steps over which the rate of new parameters rises."""

    def steps(self, final_steps: int) -> int:
        """Return the steps with the FLOPs of so many of the final size."""
        total_flops = final_steps * self.stages[-1].flops_per_token
        shares = [*(stage.share for stage in self.stages), 1.0]
        costs = (stage.flops_per_token for stage in self.stages)
        mean = sum(c * (end - at) for c, (at, end) in zip(costs, pairwise(shares), strict=True))
        near = round(total_flops / mean)
        return min(
            range(max(near - 2, 1), near + 3), key=lambda n: abs(self.flops(n) - total_flops)
        )

    def moments(self, steps: int) -> tuple[int, ...]:
        """Return the step of each growth in a run of so many."""
        return tuple(math.ceil(stage.share * steps - 1e-9) for stage in self.stages[1:])

    def costs(self, steps: int, tokens_per_step: float = 1.0) -> tuple[Spent, ...]:
        """Return what a run of so many steps spends."""
        ends = pairwise((0, *self.moments(steps), steps))
        return tuple(
            Spent(stage.flops_per_token, (end - begin) * tokens_per_step)
            for stage, (begin, end) in zip(self.stages, ends, strict=True)
        )

    def flops(self, steps: int) -> float:
        """Return the FLOPs of a run of so many steps of one token."""
        return sum(stage.flops_per_token * stage.tokens for stage in self.costs(steps))

    def branches_at(self, steps: int, decay: float) -> int:
        """Return the step at which a run of so many leaves its trunk."""
        return self.moments(steps)[0] if len(self.stages) > 1 else steps - round(decay * steps)

    def entries(self, steps: int, *, shares: bool = False) -> list[dict[str, Any]]:
        """Return the schedule of a run of so many steps, with its growth at steps or at shares of it."""
        entries = []
        for stage, step in zip(self.stages[1:], self.moments(steps), strict=True):
            when = {"at_fraction": stage.share} if shares else {"at_step": step}
            lr = {"lr": {"rewarm_new": max(2, round(self.rewarm * steps))}} if self.rewarm else {}
            entries += [{**operation, **lr, "when": when} for operation in stage.operations]
        return entries

    @property
    def growth(self) -> tuple[str, ...]:
        """Its operations as text."""
        operations = (operation for stage in self.stages for operation in stage.operations)
        return tuple(
            " ".join(
                [operation["name"], *(in_yaml(v) for k, v in operation.items() if k != "name")]
            )
            for operation in operations
        )


class GrowthProposal(msgspec.Struct, frozen=True):
    """A way to the final shape whose costs are not known yet."""

    name: str
    trunk: str
    shape: Architecture
    """The first one."""
    growth: tuple[tuple[float, tuple[dict[str, Any], ...]], ...]
    """Share of the steps, and operations."""
    rewarm: float = 0.0


def proposals(final: Architecture, decay: float) -> Iterator[GrowthProposal]:
    """Yield ways to a shape, in runs whose rate decays over the last share `decay` of their steps: copies of
    all layers at several moments and in two steps, copies between layers, the rate of copies warmed up,
    and half the width."""
    layers, stable = final.n_layer, 1 - decay
    factors = [factor for factor in _FACTORS if layers and layers % factor == 0]

    def deeper(
        sizes: tuple[int, ...], moments: tuple[float, ...], more: str = "", rewarm: float = 0.0
    ) -> GrowthProposal:
        shares = [round(stable * moment, 2) for moment in moments]
        name = "-".join(["L" + "-".join(map(str, sizes)), "at", *(f"{s:.2f}"[2:] for s in shares)])
        operations = [
            {"name": "insert_layers", "value": b - a, "from": "copy", "where": "even"}
            if more == "insert"
            else {"name": "stack_layers", "value": b // a}
            for a, b in pairwise(sizes)
        ]
        return GrowthProposal(
            f"{name}-{more}" if more else name,
            f"L{sizes[0]}",
            final.resized(layers=sizes[0]),
            tuple(
                (share, (operation,)) for share, operation in zip(shares, operations, strict=True)
            ),
            rewarm,
        )

    for factor in factors:
        for moment in _MOMENTS:
            yield deeper((layers // factor, layers), (moment,))
    if 4 in factors:
        yield deeper((layers // 4, layers // 2, layers), _TWICE)
    for factor in factors[:1]:
        yield deeper((layers // factor, layers), _MOMENTS[1:2], "rewarm", _REWARM)
    if layers > 2:  # a single layer has only copies, which stacking makes too
        yield deeper((layers - layers // 2, layers), _MOMENTS[1:2], "insert")
    axes_to_halve = ("embed", "heads", "kv_heads", "mlp")
    sizes = [getattr(final, AXES[axis]) for axis in axes_to_halve]
    if all(size % 2 == 0 for size in sizes):
        share = round(stable * _MOMENTS[1], 2)
        half = {axis: size // 2 for axis, size in zip(axes_to_halve, sizes, strict=True)}
        shape = final.resized(**half)
        wider = (
            {"name": "widen_hidden", "value": "x2"},
            {"name": "add_heads", "value": final.n_head // 2},
            {"name": "widen_mlp", "value": "x2"},
        )
        trunk = f"W{shape.n_embd}"
        yield GrowthProposal(
            f"{trunk}-{final.n_embd}-at-{f'{share:.2f}'[2:]}", trunk, shape, ((share, wider),)
        )
