"""What a run's evaluations come to: the best of each metric, when to give up, when to slow down.

Every rank has the same exactly reduced metrics and so the same judgement; what follows from it is
still decided by rank 0 and told to all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from instar.checkpoint.store import BEST
from instar.config.schema import RunConfig
from instar.run.standstill import Standing, Watching, give_up, lower, see, why

LOSS = "loss"


@dataclass(frozen=True)
class Judgement:
    """All that is remembered of the evaluations so far."""

    best: Mapping[str, Standing] = field(default_factory=dict)
    """of each metric whose best is kept, and of the loss"""
    stopping: Mapping[str, Standing] = field(default_factory=dict)
    """of each rule of early stopping, by its key: another rule begins anew"""
    plateau: Mapping[str, Standing] = field(default_factory=dict)
    """of the rule that lowers the rate, by its key"""


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

    def see(self, so_far: Judgement, metrics: Mapping[str, float], step: int) -> Judgement:
        """After one more evaluation, made at `step`."""
        return Judgement(
            best={
                name: see(rule, so_far.best.get(name, Standing()), metrics[name], step)
                for name, rule in self.best.items()
            },
            stopping={
                rule.key: see(rule, _of(rule, so_far.stopping), metrics[rule.metric], step)
                for rule in self.rules
            },
            plateau=self._slowing(
                see(self.plateau, self._standing(so_far), metrics[self.plateau.metric], step)
            ),
        )

    def give_up(self, judgement: Judgement) -> str | None:
        """Why the run should end; None: it should not."""
        states = [_of(rule, judgement.stopping) for rule in self.rules]
        return give_up(self.rules, states, self._stopping.mode)

    def slow_down(self, judgement: Judgement, lr: float) -> tuple[Judgement, float | None]:
        """The peak learning rate that is due, if any, and what is remembered after it."""
        before = self._standing(judgement)
        state, fallen = lower(self.plateau, before, self._plateau, lr, self._first_lr)
        if state == before:
            return judgement, None
        return replace(judgement, plateau=self._slowing(state)), fallen

    def why_slow(self, judgement: Judgement) -> str:
        """How long the metric that lowers the rate has not been better."""
        return why(self.plateau, self._standing(judgement))

    def best_at(self, judgement: Judgement, step: int) -> tuple[str, ...]:
        """The metrics whose best checkpoint is that of this step."""
        return tuple(
            name
            for name in self.pointers
            if name in judgement.best and judgement.best[name].best_step == step
        )

    def _standing(self, judgement: Judgement) -> Standing:
        return _of(self.plateau, judgement.plateau)

    def _slowing(self, standing: Standing) -> dict[str, Standing]:
        return {self.plateau.key: standing}


def _of(rule: Watching, standings: Mapping[str, Standing]) -> Standing:
    return standings.get(rule.key, Standing())
