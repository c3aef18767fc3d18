"""What `growth.py` asks, one column of its table each: the final shape, the optimizer, the horizon, and what is tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from study import Arm, Change, Run, Shape, flops_per_step

SMALLER = (2, 4)


@dataclass(frozen=True)
class Column:
    """One horizon of one final size under one optimizer."""

    name: str
    scratch: tuple[Arm, ...]
    """ways to train the final size, of which the trial seed's lowest loss decides"""
    fixed: tuple[Arm, ...]
    """smaller sizes that do not grow; tried at equal FLOPs"""
    batches: tuple[Arm, ...]
    """the final size with others, to see whether ramps have anything to save"""
    grown: tuple[Arm, ...]
    """tried at `share` of the FLOPs"""
    tokens_per_parameter: int
    seeds: tuple[int, ...]
    bar: float
    """most of the final size's FLOPs that growing may need"""
    clear: float | None = None
    """what the whole interval must be below"""
    ramped: tuple[Arm, ...] = ()
    """growth with ramps of context and batch, tried at `share` of the FLOPs"""
    together: tuple[Arm, ...] = ()
    """growth with both ramps at once"""
    most_together: float | None = None
    """that growth and both ramps may need"""
    share: float = 0.7
    shorter: float = 0.7
    """share of the FLOPs of a second budget of the final size"""
    budgets: tuple[float, float] = (0.62, 0.8)
    """of grown runs, as shares of the FLOPs of the final size"""
    trial_seed: int = 100

    @property
    def bars(self) -> dict[str, tuple[float | None, float | None]]:
        """Of arms: most, and what the whole interval must be below."""
        return {"grown": (self.bar, self.clear), "together": (self.most_together, None)}

    @property
    def shape(self) -> Shape:
        return self.scratch[0].shape

    @property
    def flops(self) -> float:
        """Of the final size's whole run."""
        tokens = self.tokens_per_parameter * self.shape.parameters
        steps = round(tokens / (self.shape.batch * self.shape.context))
        return steps * flops_per_step(self.shape)

    def trials(self) -> dict[str, list[Run]]:
        """With the trial seed."""
        tried = {
            "scratch": (self.scratch, 1.0),
            "fixed": (self.fixed, 1.0),
            "batch": (self.batches, 1.0),
        }
        growing = {"grown": self.grown, "ramped": self.ramped, "together": self.together}
        tried |= {part: (arms, self.share) for part, arms in growing.items()}
        return {
            part: [Run(arm, self.trial_seed, arm.steps(share * self.flops)) for arm in arms]
            for part, (arms, share) in tried.items()
            if arms
        }

    def runs(self, best: Mapping[str, Arm], seed: int) -> dict[str, list[Run]]:
        """Of a seed, by the name of their arm: two budgets each of what the trials chose."""
        arms = {part: arm for part, arm in best.items() if part not in ("fixed", "batch")}
        return {
            name: [
                Run(arm, seed, arm.steps(share * self.flops))
                for share in ((self.shorter, 1.0) if name == "scratch" else self.budgets)
            ]
            for name, arm in arms.items()
        }


@dataclass(frozen=True)
class Way:
    """How a fraction of the final size's layers becomes all of them."""

    divisor: int
    """of the layers, for those to begin with"""
    copied: tuple[tuple[float, int], ...] = ()
    """shares of the steps, and by what factor copies multiply the layers there"""
    inserted: float | None = None
    """share of the steps at which all missing layers are inserted with zeros, as a control"""
    options: str = ""
    """of the operations"""
    context: float | None = None
    """share of the steps at which the context doubles, in batches of half as many samples"""
    batch: float | None = None
    """share of the steps at which the batch doubles"""
    rate: float | None = None
    """default: the final size's"""
    decay: float | None = None

    def arm(self, like: Arm) -> Arm:
        """Into the final size that another arm trains from scratch."""
        final = like.shape.layers
        first = layers = final // self.divisor
        changes = []
        for share, factor in self.copied:
            layers *= factor
            changes.append(Change(share, f"stack_layers {factor}", self.options, layers=layers))
        if self.inserted is not None:
            operation = f"insert_layers {final - layers}"
            changes.append(Change(self.inserted, operation, "where: even", layers=final))
        shape = replace(like.shape, layers=first)
        if self.context is not None:
            shape = replace(shape, context=shape.context // 2, batch=shape.batch * 2)
        if self.batch is not None:
            shape = replace(shape, batch=shape.batch // 2)
        ramps = [(self.batch, "batch"), (self.context, "context")]
        context, batch = shape.context, shape.batch
        for share, what in sorted((share, what) for share, what in ramps if share is not None):
            if what == "batch":
                batch *= 2
                changes.append(Change(share, "change_batch_size 2", batch=batch))
            else:
                context, batch = context * 2, batch // 2
                doubled = {"context": context, "batch": batch}
                changes.append(Change(share, "change_context 2", "tokens: keep", **doubled))
        return replace(
            like,
            shape=shape,
            rate=self.rate or like.rate,
            decay=self.decay or like.decay,
            changes=tuple(sorted(changes, key=lambda change: change.share)),
        )


def column(
    name: str,
    optimizer: str,
    final: Shape,
    tokens_per_parameter: int,
    scratch: Sequence[tuple[float, float]],
    ways: Sequence[Way],
    seeds: Sequence[int],
    bar: float,
    clear: float | None = None,
    *,
    batches: Sequence[int] = (),
    ramped: Sequence[Way] = (),
    together: Sequence[Way] = (),
    most_together: float | None = None,
    budgets: tuple[float, float] = (0.62, 0.8),
    smaller: Sequence[int] = SMALLER,
) -> Column:
    """One of a final size.

    Args:
        smaller: what its layers are divided by for sizes that do not grow.
        scratch: rates and decays to try for it; all other arms have the first ones unless they say otherwise.
    """
    arms = [Arm(optimizer, final, rate, decay, read=final.context) for rate, decay in scratch]
    return Column(
        name,
        tuple(arms),
        tuple(Way(divisor).arm(arms[0]) for divisor in smaller),
        tuple(replace(arms[0], shape=replace(final, batch=batch)) for batch in batches),
        tuple(way.arm(arms[0]) for way in ways),
        tokens_per_parameter,
        tuple(seeds),
        bar,
        clear,
        ramped=tuple(way.arm(arms[0]) for way in ramped),
        together=tuple(way.arm(arms[0]) for way in together),
        most_together=most_together,
        budgets=budgets,
    )
