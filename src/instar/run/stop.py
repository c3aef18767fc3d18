"""When a run ends: budgets. Signals and failures arrive through the same decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instar.config.budget import Budget
from instar.run.progress import Progress

REACHED = "reached "
"""How the reason begins where a budget is used up."""


@dataclass(frozen=True)
class Decision:
    """Why all ranks leave the loop at this step."""

    reason: str
    interrupted: bool
    """a signal asked for it, so the run is not at its end"""

    @property
    def is_budget(self) -> bool:
        """Whether the run has done what it was to do."""
        return self.reason.startswith(REACHED)


def budget_met(
    budgets: Sequence[Budget],
    progress: Progress,
    *,
    epochs: float,
    validation_loss: float | None,
) -> Budget | None:
    """The first counted budget that is used up, or None; the same answer on every rank.

    Budgets in seconds are not counted but measured: rank 0 asks for the end when its clock says
    so (`run/safepoint.py`).

    Args:
        epochs: passes through the data so far.
        validation_loss: of an evaluation made at this very step, else None.
    """
    used = _used(progress, epochs)
    for budget in budgets:
        if budget.kind == "loss":
            if validation_loss is not None and validation_loss < budget.amount:
                return budget
        elif budget.kind != "seconds" and used[budget.kind] >= budget.amount:
            return budget
    return None


def fraction_used(budgets: Sequence[Budget], progress: Progress, epochs: float) -> float | None:
    """The share that is used up of the counted budget nearest to its end; None without one."""
    used = _used(progress, epochs)
    shares = [used[b.kind] / b.amount for b in budgets if b.kind in used]
    return max(shares, default=None)


def _used(progress: Progress, epochs: float) -> dict[str, float]:
    return {
        "steps": float(progress.step),
        "tokens": float(progress.tokens),
        "samples": float(progress.samples),
        "epochs": epochs,
    }
