"""A pilot whose runs follow a known law exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

from instar.extensions.lab.pilot_file import Pilot, PilotCase, PilotModel, PilotRun, Spent
from instar.extensions.lab.saving import worth

SMALL, FINAL = 300.0, 1000.0
"""FLOPs per token"""
TOKENS = 100.0
"""per step"""
Theta = Callable[[float], float]


def loss_after(tokens: float) -> float:
    """Of the final size from scratch, decayed."""
    return 5.0 - 0.4 * math.log(tokens)


def stage_budgets(steps: int, grown_at: int) -> tuple[Spent, ...]:
    small, large = Spent(SMALL, grown_at * TOKENS), Spent(FINAL, (steps - grown_at) * TOKENS)
    return tuple(stage for stage in (small, large) if stage.tokens)


def a_pilot(theta: Theta, *, seeds: tuple[int, ...] = (1,), spread: float = 0.0) -> Pilot:
    """Whose grown run is worth what `theta` says of the tokens before the growth, and whose evaluations
    say the same; seeds are `spread` nats apart, by turns up and down."""
    runs: list[PilotRun] = []
    for number, seed in enumerate(seeds):
        for arm, steps, grown_at in (
            ("final", 100, 0),
            ("final", 200, 0),
            ("grown", 200, 120),
            ("small", 250, 250),
        ):
            case = PilotCase(arm, seed, steps, (grown_at,) if arm == "grown" else ())
            cost = stage_budgets(steps, grown_at)
            tokens = worth(cost, theta(max(grown_at, 1) * TOKENS))
            off = spread * (-1) ** (number + (arm == "final"))
            evaluations = []
            for step in range(10, steps, 5):
                γ = (SMALL / FINAL) ** theta(step * TOKENS) if step <= grown_at else 1.0
                loss = 1.0 + loss_after(γ * step * TOKENS)
                evaluations.append((step, step * TOKENS, loss))
            runs.append(PilotRun(case, loss_after(tokens) + off, cost, tuple(evaluations)))
    return Pilot(
        name="tiny",
        settings={"optimizer.lr": 0.1},
        growth=("stack_layers 4",),
        run_steps=2000,
        stable_share=0.8,
        tokens_per_step=TOKENS,
        evaluations=20,
        small=PilotModel(5000, SMALL, 0.25),
        final=PilotModel(20_000, FINAL, 0.5),
        cases=tuple(run.case for run in runs),
        runs=tuple(runs),
    )
