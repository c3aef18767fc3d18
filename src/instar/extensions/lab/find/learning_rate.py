"""Finds a learning rate by short trainings of a config: its model, data and schedule.

A range test (Smith, arXiv 1506.01186) raises the rate within one training and reads off where the
loss falls fastest. That is a property of the first steps and often far from the rate with the
lowest *final* loss. Here every candidate is a training of its own, with its whole schedule: successive
halving over a geometric grid spends most steps on the best ones, and a parabola through the best has its
minimum at the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np

from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.config.schema import RunConfig
from instar.distributed.world import join_group
from instar.extensions.lab.find.training import final_loss, prepared_alone, shorten_config
from instar.extensions.lab.halving import rung_steps, survivors
from instar.logs.plot.chart import Annotation, Chart, Curve, Panel, Polyline, metric_text

SHORTEST = 400
"""Default steps of the longest trainings, if an eighth of the run is less. In the first steps of a
training, rates are best that are several times too high for the rest of it."""
_HELD_OUT = 4
"""The validation subset has at most one micro-batch for this many steps."""

FinalLoss = Callable[[float, int], float]
"""(learning rate, steps) → final loss; infinity if the training diverges"""

_SIDE = 3
"""Rates of the first round on either side of the given one, a factor 4 apart."""
_KEPT = 3
"""Rates that go on to the next round."""
BUDGET = 10
"""Default budget, in trainings of full length. A search without detours needs 7.25 to 9.25."""
_DIVERGED = 1.5
"""losses of short trainings above this multiple of the lowest one, and infinite ones, are beyond the picture"""


@dataclass(frozen=True)
class ShortRun:
    """One short training."""

    lr: float
    steps: int
    loss: float
    """final loss; infinity if it diverged"""

    def __str__(self) -> str:
        return f"lr {self.lr:.2e}  {self.steps:,} steps  loss {self.loss:.4f}"


@dataclass(frozen=True)
class FoundRate:
    """Result of a search."""

    lr: float
    """minimum of the parabola through the best of the longest trainings and its neighbours"""
    runs: tuple[ShortRun, ...]
    """in the order in which they were trained"""
    finished: bool
    """whether worse rates were tried, for all steps, on both sides of the best; False: the budget
    was used up before"""

    @property
    def steps(self) -> int:
        """Steps of all trainings together."""
        return sum(run.steps for run in self.runs)

    def rounds(self) -> dict[int, list[ShortRun]]:
        """Return the runs of each number of steps, in ascending order of both."""
        ordered_runs = sorted(self.runs, key=lambda run: (run.steps, run.lr))
        return {steps: list(runs) for steps, runs in groupby(ordered_runs, lambda run: run.steps)}


@dataclass(frozen=True)
class RateFound:
    """A learning rate, and how it was found."""

    rate: FoundRate
    steps: int
    """steps of the longest trainings"""
    run_steps: int | None
    """steps of the run itself, or of its schedule; None: unknown"""
    settings: dict[str, float]
    """values for the config, by dotted key"""

    def table(self) -> list[list[str]]:
        """Return the loss of each rate after each number of steps; the first row has the headers."""
        rounds = self.rate.rounds()
        losses = {(run.lr, run.steps): f"{run.loss:.4f}" for run in self.rate.runs}
        rates = sorted({run.lr for run in self.rate.runs})
        return [
            ["lr", *(f"{steps:,} steps" for steps in rounds)],
            *(
                [f"{rate:.2e}", *(losses.get((rate, steps), "") for steps in rounds)]
                for rate in rates
            ),
        ]

    def notes(self) -> list[str]:
        """Return what to know of the result, as sentences."""
        rate = self.rate
        lines = [f"{len(rate.runs)} trainings, {rate.steps:,} steps together"]
        if not rate.finished:
            lines.append(
                "the budget was used up before worse rates were seen on both sides after "
                f"{self.steps:,} steps: give a larger --budget, or fewer --steps"
            )
        if self.run_steps is None or self.run_steps > self.steps:
            lines.append(
                f"lowest loss after {self.steps:,} steps; the best rate of a longer run may be lower"
            )
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "settings": self.settings,
            "lr": self.rate.lr,
            "steps": self.steps,
            "run_steps": self.run_steps,
            "finished": self.rate.finished,
            "runs": [asdict(run) for run in self.rate.runs],
            "notes": self.notes(),
        }


def find_learning_rate(
    loaded_config: Loaded,
    steps: int | None = None,
    budget: int | None = None,
    *,
    say: Callable[[str], None] = lambda _: None,
    on_run: Callable[[ShortRun], None] = lambda _: None,
) -> RateFound:
    """Search the learning rate with the lowest validation loss after short trainings.

    All trainings have the same initial weights, samples and validation subset, and the config's
    learning rate schedule, shortened. They run in this process: the number of ranks changes neither
    the global batch nor the loss. Nothing is written.

    Args:
        steps: of the longest trainings; default: an eighth of the run, at least `SHORTEST`, at most
            the run.
        budget: steps of all trainings; default: `BUDGET` · steps.
        say: reports the preparation of data.

    Raises:
        ConfigError: the run could not start, or no training has a finite loss.
    """
    prepared_run = prepared_alone(loaded_config, say)
    run_steps = prepared_run.forecast.steps or prepared_run.config.learning_rate.lr_decay_iters
    if steps is None:
        steps = SHORTEST if run_steps is None else min(run_steps, max(run_steps // 8, SHORTEST))
    with join_group(loaded_config.config.parallel, loaded_config.config.device) as world:
        config = prepared_run.config
        held_out = max(1, steps * config.train.gradient_accumulation_steps // _HELD_OUT)

        def loss(lr: float, length: int) -> float:
            short = shorten_config(config, lr, length, run_steps or steps, held_out)
            return final_loss(prepared_run, short, world, length)

        try:
            rate = search_rate(loss, config.optimizer.lr, steps, budget or BUDGET * steps, on_run)
        except ValueError as error:
            raise ConfigError.of(
                str(error), where="--budget", hint="give a larger one, or a lower optimizer.lr"
            ) from None
    return RateFound(rate, steps, run_steps, _settings(config, rate.lr))


def _settings(config: RunConfig, lr: float) -> dict[str, float]:
    """Return the values to set, with two significant digits; Muon's rate keeps its ratio."""
    values = {"optimizer.lr": lr}
    if config.optimizer.name == "muon":
        values["optimizer.muon_lr"] = lr * config.optimizer.muon_lr / config.optimizer.lr
    return {key: float(f"{value:.2g}") for key, value in values.items()}


def search_rate(
    loss: FinalLoss,
    start: float,
    steps: int,
    budget: int,
    on_run: Callable[[ShortRun], None] = lambda _: None,
) -> FoundRate:
    """Find the learning rate with the lowest loss after `steps` steps.

    Three rounds train for a quarter of the steps, a half, and all: rates a factor 4 apart from
    `start` / 64 to `start` · 64; the best three of them and those between; the best three of these.
    While the best rate of a round is at the edge of those that were tried, the next one is tried as
    well. Rates are always `start` times a power of 2.

    Args:
        loss: of trainings that differ in nothing but the rate: on the same samples, in the same
            order, from the same initial weights.
        budget: maximum steps of all trainings together.
        on_run: called after each training.

    Raises:
        ValueError: every training diverged, or the budget allows none.
    """
    rate_search = _Search(loss, start, budget, on_run)
    is_finished = False
    try:
        coarse, fine, full = (max(1, rung) for rung in rung_steps(steps))
        best = rate_search.round(range(-2 * _SIDE, 2 * _SIDE + 1, 2), coarse, stride=2)
        best = rate_search.round(_with_middles(best), fine)
        rate_search.round(best, full)
        is_finished = True
    except _OverBudget:
        pass
    return FoundRate(
        start * 2.0 ** _minimum(rate_search.losses), tuple(rate_search.runs), is_finished
    )


class _OverBudget(Exception):  # noqa: N818
    """The next training would exceed the budget."""


class _Search:
    """Trains and remembers. A rate is `start` times 2 to the power of its exponent."""

    def __init__(
        self, loss: FinalLoss, start: float, budget: int, on_run: Callable[[ShortRun], None]
    ) -> None:
        self.loss, self.start, self.remaining_steps, self.on_run = loss, start, budget, on_run
        self.runs: list[ShortRun] = []
        self.losses: dict[int, float] = {}
        """finite losses of the last whole round, or of the first, by exponent"""

    def round(self, exponents: Iterable[int], steps: int, stride: int = 1) -> list[int]:
        """Train with `exponents`, and with further ones while the best is at the edge; return the
        best, in ascending order."""
        losses: dict[int, float] = {}
        waiting = list(exponents)
        try:
            while waiting:
                for exponent in waiting:
                    losses[exponent] = self._train(exponent, steps)
                best = _best(losses)
                waiting = [e for e in (best - stride, best + stride) if e not in losses][:1]
        finally:
            if not (waiting and self.losses):
                self.losses = {e: loss for e, loss in losses.items() if math.isfinite(loss)}
        return sorted(survivors(self.losses, _KEPT))

    def _train(self, exponent: int, steps: int) -> float:
        if steps > self.remaining_steps:
            raise _OverBudget
        self.remaining_steps -= steps
        lr = self.start * 2.0**exponent
        run = ShortRun(lr, steps, self.loss(lr, steps))
        self.runs.append(run)
        self.on_run(run)
        return run.loss


def _best(losses: Mapping[int, float]) -> int:
    """Return the exponent with the lowest loss, the smallest one of several."""
    return min(losses, key=lambda exponent: (losses[exponent], exponent))


def _with_middles(exponents: list[int]) -> list[int]:
    """Return the exponents, and those in the middle of two that are a stride apart."""
    return sorted({*exponents, *(e + 1 for e in exponents if e + 2 in exponents)})


def _minimum(losses: Mapping[int, float]) -> float:
    """Return the exponent of the minimum, between two that were tried.

    Raises:
        ValueError: there are none.
    """
    if not losses:
        raise ValueError("no training had a finite loss within the budget")
    best = _best(losses)
    if not {best - 1, best + 1} <= losses.keys():
        return best
    below, above = losses[best - 1] - losses[best], losses[best + 1] - losses[best]
    # the vertex of the parabola, at most half a stride from the best
    return best + 0.5 * (below - above) / (below + above) if below + above > 0 else best


def rates_chart(rounds: Mapping[str, Sequence[tuple[float, float]]], best_rate: float) -> Chart:
    """Return a chart of the final losses of short trainings over their learning rates: a curve per round, and a
    mark at the chosen rate.

    Args:
        rounds: (learning rate, final loss) by label, in ascending order of the rate.
    """
    losses = [loss for points in rounds.values() for _, loss in points if np.isfinite(loss)]
    lowest, highest = min(losses), max(losses)
    top = min(highest, lowest + _DIVERGED * abs(lowest))
    room = 0.06 * (top - lowest) or 0.1
    curves = tuple(
        Curve("val/loss", run, Polyline(*_columns(points)), held_out=True)
        for run, points in enumerate(rounds.values())
    )
    panel = Panel(metric_text("val/loss"), curves, limits=(lowest - room, top + room))
    rates = [rate for points in rounds.values() for rate, _ in points]
    text = f"lr {best_rate:.2g}"
    return Chart(
        title="Final loss by learning rate",
        subtitle="",
        axis="lr",
        label=metric_text("lr"),
        runs=tuple(rounds),
        panels=(panel,),
        marks=(Annotation("operation", best_rate, len(rounds) - 1, text, text, "setting"),),
        log_x=True,
        limits=(min(rates), max(rates)),
    )


def _columns(points: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.array(points, dtype=np.float64).T
    return x, np.where(np.isfinite(y), y, np.nan)
