"""The runs of `growth.py` as data: which arm trains which size for how long, and as which segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from instar.config.load import load
from instar.models.architecture import Architecture, resolve
from instar.models.cost import flops_per_token
from segments import Segment

DECAY = 0.2
"""share of all steps in which the rate falls to zero"""


@dataclass(frozen=True)
class Rate:
    """Peak of the learning rate, and steps of warm-up."""

    lr: float
    warmup: int

    def __str__(self) -> str:
        return f"lr{self.lr:g}-w{self.warmup}"


@dataclass(frozen=True)
class Growth:
    """A way to the final size: layers at first, and at each share of the final size's steps an
    operation and the layers after it."""

    layers: int
    stages: tuple[tuple[float, str, int], ...]

    def __str__(self) -> str:
        return " ".join([str(self.layers), *(f"{op}@{share:g}" for share, op, _ in self.stages)])


@dataclass(frozen=True)
class Shape:
    """All sizes of the study: they differ in their number of layers."""

    layers: int
    """of the final one"""
    heads: int
    width: int
    context: int
    vocabulary: int
    batch: int

    def architecture(self, layers: int) -> Architecture:
        """One of the sizes, as `settings` asks for it."""
        config = load(None, (*self.settings(), f"model.n_layer={layers}")).config
        return resolve(config.model, self.vocabulary)

    def flops_per_step(self, layers: int) -> float:
        """Forward and backward, of one of the sizes."""
        return flops_per_token(self.architecture(layers)) * self.batch * self.context

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


@dataclass(frozen=True)
class Change:
    """What happens to an arm between two steps."""

    step: int
    operations: tuple[str, ...]
    layers: int
    settings: tuple[str, ...] = ()
    resets_rate: bool = False
    """the rate's course begins anew here"""


@dataclass(frozen=True)
class Arm:
    """A trunk at a stable rate, and from it a decay to the end of each budget."""

    name: str
    seed: int
    rate: Rate
    layers: int
    """at first"""
    ends: tuple[int, ...]
    """last steps"""
    changes: tuple[Change, ...] = ()

    @property
    def base(self) -> str:
        """Name of the trunk up to the first change, which arms share."""
        return f"s{self.seed}-{self.layers}L-{self.rate}"

    def decays(self) -> dict[int, int]:
        """First step of each end's decay.

        Raises:
            ValueError: a change comes after it.
        """
        starts = {end: end - round(DECAY * end) for end in self.ends}
        if self.changes and min(starts.values()) <= self.changes[-1].step:
            raise ValueError(f"{self.name}: {self.changes[-1].step} is within the shortest decay")
        return starts


def last_step(shape: Shape, layers: int, changes: Sequence[Change], flops: float) -> int:
    """Steps after which an arm has used so many FLOPs."""
    begun = 0
    for change in changes:
        flops -= (change.step - begun) * shape.flops_per_step(layers)
        begun, layers = change.step, change.layers
    return begun + round(flops / shape.flops_per_step(layers))


def ends_of(arms: Sequence[Arm]) -> dict[Arm, dict[int, Segment]]:
    """The decayed segments of every arm, by their last step; trunks are cut so that arms share them."""
    cuts: dict[str, set[int]] = {}
    for arm in arms:
        first = arm.changes[0].step if arm.changes else None
        shared = {start for start in arm.decays().values() if first is None} | {first}
        cuts.setdefault(arm.base, set()).update(cut for cut in shared if cut is not None)
    return {arm: _ends(arm, cuts) for arm in arms}


def _ends(arm: Arm, cuts: Mapping[str, set[int]]) -> dict[int, Segment]:
    reset = next((c.step for c in reversed(arm.changes) if c.resets_rate), 0)
    return {
        end: Segment(
            f"{arm.base}-{arm.name}-until-{end}",
            end,
            (
                "learning_rate.shape=wsd",
                f"learning_rate.lr_decay_iters={end - reset}",
                f"learning_rate.decay_fraction={(end - start) / (end - reset)}",
            ),
            _trunk(arm, start, cuts),
        )
        for end, start in arm.decays().items()
    }


def _trunk(arm: Arm, step: int, cuts: Mapping[str, set[int]]) -> Segment:
    """The arm at its stable rate, up to a step."""
    before = [change for change in arm.changes if change.step < step]
    if not before:
        earlier = max((cut for cut in cuts[arm.base] if cut < step), default=None)
        if earlier is not None:
            return Segment(f"{arm.base}-{step}", step, (), _trunk(arm, earlier, cuts))
        begun = (f"model.n_layer={arm.layers}", f"seed={arm.seed}")
        rate = (f"optimizer.lr={arm.rate.lr}", f"learning_rate.warmup_iters={arm.rate.warmup}")
        return Segment(f"{arm.base}-{step}", step, (*begun, *rate))
    change = before[-1]
    own = {*arm.decays().values(), *(each.step for each in arm.changes)}
    earlier = max((cut for cut in own if change.step < cut < step), default=None)
    name = f"{arm.base}-{arm.name}-{step}"
    if earlier is not None:
        return Segment(name, step, (), _trunk(arm, earlier, cuts))
    parent = _trunk(arm, change.step, cuts)
    return Segment(name, step, change.settings, parent, change.operations)
