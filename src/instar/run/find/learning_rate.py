"""Finds a learning rate by short trainings of a config: its model, data and schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.config.schema import RunConfig
from instar.distributed.world import join
from instar.run.find.search import BUDGET, FoundRate, ShortRun, search
from instar.run.find.training import final_loss, prepared_alone, shortened

SHORTEST = 400
"""Default steps of the longest trainings, if an eighth of the run is less. In the first steps of a
training, rates are best that are several times too high for the rest of it."""
_HELD_OUT = 4
"""The validation subset has at most one micro-batch for this many steps."""


@dataclass(frozen=True)
class RateFound:
    """A learning rate, and how it was found."""

    found: FoundRate
    steps: int
    """steps of the longest trainings"""
    run_steps: int | None
    """steps of the run itself, or of its schedule; None: unknown"""
    settings: dict[str, float]
    """values for the config, by dotted key"""

    def notes(self) -> list[str]:
        """Return what to know of the result, as sentences."""
        found = self.found
        said = [f"{len(found.runs)} trainings, {found.steps:,} steps together"]
        if not found.finished:
            said.append(
                "the budget was used up before worse rates were seen on both sides after "
                f"{self.steps:,} steps: give a larger --budget, or fewer --steps"
            )
        if self.run_steps is None or self.run_steps > self.steps:
            said.append(
                f"lowest loss after {self.steps:,} steps; the best rate of a longer run may be lower"
            )
        return said

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "settings": self.settings,
            "lr": self.found.lr,
            "steps": self.steps,
            "run_steps": self.run_steps,
            "finished": self.found.finished,
            "runs": [asdict(run) for run in self.found.runs],
            "notes": self.notes(),
        }


def find_learning_rate(
    loaded: Loaded,
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
    prepared = prepared_alone(loaded, say)
    run_steps = prepared.forecast.steps or prepared.config.learning_rate.lr_decay_iters
    if steps is None:
        steps = SHORTEST if run_steps is None else min(run_steps, max(run_steps // 8, SHORTEST))
    with join(loaded.config.parallel, loaded.config.device) as world:
        config = prepared.config
        held_out = max(1, steps * config.train.gradient_accumulation_steps // _HELD_OUT)

        def loss(lr: float, length: int) -> float:
            short = shortened(config, lr, length, run_steps or steps, held_out)
            return final_loss(prepared, short, world, length)

        try:
            found = search(loss, config.optimizer.lr, steps, budget or BUDGET * steps, on_run)
        except ValueError as error:
            raise ConfigError.one(
                str(error), where="--budget", hint="give a larger one, or a lower optimizer.lr"
            ) from None
    return RateFound(found, steps, run_steps, _settings(config, found.lr))


def _settings(config: RunConfig, lr: float) -> dict[str, float]:
    """Return the values to set, with two significant digits; Muon's rate keeps its ratio."""
    values = {"optimizer.lr": lr}
    if config.optimizer.name == "muon":
        values["optimizer.muon_lr"] = lr * config.optimizer.muon_lr / config.optimizer.lr
    return {key: float(f"{value:.2g}") for key, value in values.items()}
