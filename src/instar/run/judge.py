"""What a run's evaluations come to: the best of each metric, when to give up, when to slow down.

Every rank has the same exactly reduced metrics and so the same judgement; what follows from it is
still decided by rank 0 and told to all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from instar.checkpoint.store import BEST
from instar.config.schema import RunConfig
from instar.run.standstill import Standing, Watching, give_up, lower, see

LOSS = "loss"


@dataclass(frozen=True)
class Judgement:
    """All that is remembered of the evaluations so far."""

    best: Mapping[str, Standing] = field(default_factory=dict)
    """of each metric whose best is kept, and of the loss"""
    stopping: tuple[Standing, ...] = ()
    """of each rule of early stopping"""
    plateau: Standing = field(default_factory=Standing)


class Judge:
    """The rules that a config asks for."""

    def __init__(self, config: RunConfig) -> None:
        directions = config.metrics
        self._stopping, self._plateau = config.early_stopping, config.learning_rate.plateau
        self._first_lr = config.optimizer.lr
        kept = dict.fromkeys((LOSS, *config.checkpoint.best_of))
        self.best = {name: Watching(name, directions[name]) for name in kept}
        self.rules = tuple(
            Watching.of(rule, directions[rule.metric]) for rule in self._stopping.rules
        )
        self.plateau = Watching.of(self._plateau, directions[self._plateau.metric])
        self.pointers = {
            name: BEST if number == 0 else f"{BEST}-{name.replace('/', '-')}"
            for number, name in enumerate(config.checkpoint.best_of)
        }
        """what the best checkpoint of each metric is called"""

    def begun(self, known: Judgement | None = None) -> Judgement:
        """Nothing seen yet; or what is `known`, where the rules are as many as they were."""
        known = known or Judgement()
        if len(known.stopping) == len(self.rules):
            return known
        return replace(known, stopping=(Standing(),) * len(self.rules))

    def see(self, so_far: Judgement, metrics: Mapping[str, float], step: int) -> Judgement:
        """After one more evaluation, made at `step`."""
        return Judgement(
            best={
                name: see(rule, so_far.best.get(name, Standing()), metrics[name], step)
                for name, rule in self.best.items()
            },
            stopping=tuple(
                see(rule, state, metrics[rule.metric], step)
                for rule, state in zip(self.rules, so_far.stopping, strict=True)
            ),
            plateau=see(self.plateau, so_far.plateau, metrics[self.plateau.metric], step),
        )

    def give_up(self, judgement: Judgement) -> str | None:
        """Why the run should end; None: it should not."""
        return give_up(self.rules, judgement.stopping, self._stopping.mode)

    def slow_down(self, judgement: Judgement, lr: float) -> tuple[Judgement, float | None]:
        """The peak learning rate that is due, if any, and what is remembered after it."""
        state, fallen = lower(self.plateau, judgement.plateau, self._plateau, lr, self._first_lr)
        return replace(judgement, plateau=state), fallen

    def best_at(self, judgement: Judgement, step: int) -> tuple[str, ...]:
        """The metrics whose best checkpoint is that of this step."""
        return tuple(
            name
            for name in self.pointers
            if name in judgement.best and judgement.best[name].best_step == step
        )
