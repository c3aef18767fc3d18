"""When a run ends: budgets. Signals and failures arrive through the same decision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from instar.config.budget import Budget
from instar.run.progress import Progress


@dataclass(frozen=True)
class Decision:
    """Why all ranks leave the loop at this step."""

    reason: str
    interrupted: bool
    """a signal asked for it, so the run is not at its end"""


@dataclass(frozen=True)
class Best:
    """The lowest validation loss so far, in nats, and the step it was measured at."""

    loss: float
    step: int

    @staticmethod
    def of(best: Best | None, loss: float, step: int) -> Best | None:
        """`best` after one more evaluation; what is not finite is never the best."""
        better = math.isfinite(loss) and (best is None or loss < best.loss)
        return Best(loss, step) if better else best


def budget_met(
    budgets: Sequence[Budget],
    progress: Progress,
    *,
    samples_per_epoch: int,
    validation_loss: float | None,
) -> Budget | None:
    """The first counted budget that is used up, or None; the same answer on every rank.

    Budgets in seconds are not counted but measured: rank 0 asks for the end when its clock says
    so (`run/safepoint.py`).

    Args:
        validation_loss: of an evaluation made at this very step, else None.
    """
    used = {
        "steps": float(progress.step),
        "tokens": float(progress.tokens),
        "samples": float(progress.samples),
        "epochs": progress.samples / samples_per_epoch,
    }
    for budget in budgets:
        if budget.kind == "loss":
            if validation_loss is not None and validation_loss < budget.amount:
                return budget
        elif budget.kind != "seconds" and used[budget.kind] >= budget.amount:
            return budget
    return None
