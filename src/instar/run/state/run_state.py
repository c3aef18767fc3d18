"""State of a run: everything that a checkpoint stores except tensors, as one frozen value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from instar.config.budget import Counters
from instar.run.state.data_phase import DataPhase
from instar.run.state.early_stopping import MetricState
from instar.run.state.gradient_stats import NoiseScale, Skips
from instar.schedule.branches import BRANCH
from instar.schedule.operations import Change, History, State
from instar.schedule.posted import Cancelled, Posted
from instar.schedule.settings import Settings
from instar.schedule.triggers import Entry, remaining
from instar.tasks.basis import Basis, incomparable


@dataclass(frozen=True)
class Interval:
    """An interval of training: `Interval(500)` steps, `Interval(10**9, "tokens")`."""

    count: int
    unit: Literal["steps", "tokens", "epochs"] = "steps"

    def due(self, before: int, now: int) -> bool:
        """Return whether a multiple of the interval lies in (before, now]."""
        return now // self.count > before // self.count


REACHED = "reached "
"""Prefix of the reason if a budget is used up."""


@dataclass(frozen=True)
class Decision:
    """Reason why all ranks leave the training loop at this step."""

    reason: str
    is_interrupted: bool
    """a stop was requested before the run's end"""
    is_failure: bool = False
    """interrupted by a failure, not by a request"""

    @property
    def is_budget(self) -> bool:
        """Whether a budget of the run is used up."""
        return self.reason.startswith(REACHED)


@dataclass(frozen=True)
class RunState:
    """State of a run between two steps, the same on every rank.

    `to_json` gives what a checkpoint stores in addition to tensors and history; `from_json` is its
    inverse.
    """

    in_force: State
    """current settings and architecture: the config after the history"""
    phase: DataPhase
    """data phase of the next samples"""
    progress: Counters = field(default_factory=Counters)
    before: Counters = field(default_factory=Counters)
    """progress before the last step, or before the round in which it is"""
    history: History = ()
    metrics: MetricState = field(default_factory=MetricState)
    """best values, early stopping and plateau, after all evaluations so far"""
    evaluated_metrics: Mapping[str, float] = field(default_factory=dict)
    """metrics of the last evaluation"""
    basis: Basis = field(default_factory=dict)
    """on which the last evaluation was measured; empty before the first"""
    losses: tuple[tuple[int, float], ...] = ()
    """(step, validation loss) since the last operation of the schedule, as many as triggers need"""
    noise: NoiseScale = field(default_factory=NoiseScale)
    """gradient noise scale of this model and length of samples"""
    skips: Skips = field(default_factory=Skips)
    posted: tuple[Posted, ...] = ()
    """operations that people asked for, which wait for their triggers"""
    cancelled: tuple[Cancelled, ...] = ()
    """entries of the schedule that people gave up"""
    closed: tuple[str, ...] = ()
    """requests that ended without an operation: what was cancelled before its trigger fired, and the request to"""
    resumed_s: float = 0.0
    """seconds of training before this start of the run"""
    evaluated_at: int = -1
    """step of the last evaluation of this model; -1: none"""
    judged_at: int = -1
    """step of the last evaluation that counts for the best value and for early stopping"""
    evaluation_checked_at: int = -1
    """step of the last check whether an evaluation is due"""
    save_checked_at: int = 0
    """step of the last check whether a save is due"""
    reevaluates_at: int = -1
    """step of an operation whose evaluation was cut short by a stop; -1: none"""
    grown_at: int = -1
    """step of the last operation that replaced the model; -1: none"""
    sampled_at: int = 0
    """step of the last sample text; only rank 0 knows it"""

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def settings(self) -> Settings:
        """The current hyperparameters."""
        return self.in_force.settings

    @property
    def skipped_in_a_row(self) -> int:
        """Number of consecutive last steps with a gradient that was not finite. Waits for the last one."""
        return self.skips.in_a_row

    @property
    def loss(self) -> float | None:
        """Validation loss of this step, also after a resume; None: not evaluated at this step."""
        step, loss = self.losses[-1] if self.losses else (-1, None)
        return loss if step == self.step else None

    @property
    def epochs(self) -> float:
        """Passes over the data so far."""
        return self.phase.epochs(self.progress.samples)

    def due(self, every: Interval | None) -> bool:
        """Return whether an interval ended with the last step, or in its round; None is never due."""
        if every is None:
            return False
        before, now = (
            self._position(counters, every.unit) for counters in (self.before, self.progress)
        )
        return every.due(before, now)

    def _position(self, progress: Counters, unit: Literal["steps", "tokens", "epochs"]) -> int:
        match unit:
            case "steps":
                return progress.step
            case "tokens":
                return progress.tokens
            case "epochs":
                return self.phase.whole_epochs(progress.samples)

    def after_step(self, samples: int, tokens: int, flops: float, seconds: float) -> RunState:
        """Return the state after one more step."""
        progress = self.progress.after_step(samples, tokens, flops, seconds)
        return replace(self, progress=progress, before=self.progress)

    def on_basis(self, basis: Basis) -> tuple[RunState, tuple[str, ...]]:
        """Return the state before an evaluation on a basis, and why earlier ones cannot be compared.

        If there is a reason, best values, early stopping, plateaus and the losses of triggers begin anew.
        """
        reasons = incomparable(self.basis, basis) if self.basis else ()
        if reasons:
            return replace(self, basis=basis, metrics=MetricState(), losses=()), reasons
        return replace(self, basis=basis), ()

    def with_change(self, change: Change, in_force: State) -> RunState:
        """Return the state after a change of the run, carried out or skipped."""
        # losses before an operation of the schedule must not count for a plateau after it
        keeps_losses = not change.is_wanted or change.is_given_up or change.operation.name == BRANCH
        losses = self.losses if keeps_losses else ()
        was = self.in_force
        same = (was.settings.context, was.architecture) == (
            in_force.settings.context,
            in_force.architecture,
        )
        return replace(
            self,
            history=(*self.history, change),
            in_force=in_force,
            losses=losses,
            noise=self.noise if same else NoiseScale(),
            posted=tuple(post for post in self.posted if post.id != change.id),
        )

    def ahead(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Return the entries of the schedule that are neither carried out, nor skipped, nor given up."""
        numbers = {entry.number for entry in self.cancelled}
        return [e for e in remaining(entries, self.history) if e.number not in numbers]

    def under_another_schedule(self) -> RunState:
        """Return the state without what people gave up of the schedule, whose numbers mean other entries now.

        The requests stay answered.
        """
        answered = (entry.id for entry in self.cancelled)
        return replace(self, cancelled=(), closed=(*self.closed, *answered))

    @property
    def request_ids(self) -> set[str]:
        """The requests of people that this state has taken in, carried out or not."""
        changes = {change.id for change in self.history if change.id}
        posts = {post.id for post in self.posted}
        return changes | posts | {entry.id for entry in self.cancelled} | {*self.closed}

    def to_json(self) -> dict[str, Any]:
        return {
            "progress": dataclasses.asdict(self.progress),
            "before": dataclasses.asdict(self.before),
            "course": self.phase.state(),
            "judgement": msgspec.to_builtins(self.metrics),
            "evaluated_at": self.evaluated_at,
            "metrics": dict(self.evaluated_metrics),
            "basis": dict(self.basis),
            "judged_at": self.judged_at,
            "asked_at": self.evaluation_checked_at,
            "sampled_at": self.sampled_at,
            "losses": self.losses,
            "noise": dataclasses.asdict(self.noise),
            "skipped_in_a_row": self.skipped_in_a_row,
            # absent in nearly all runs
            **({"reevaluates_at": self.reevaluates_at} if self.reevaluates_at >= 0 else {}),
            **({"posted": msgspec.to_builtins(self.posted)} if self.posted else {}),
            **({"cancelled": msgspec.to_builtins(self.cancelled)} if self.cancelled else {}),
            **({"closed": self.closed} if self.closed else {}),
        }

    @classmethod
    def from_json(
        cls, state: Mapping[str, Any], in_force: State, phase: DataPhase, history: History
    ) -> RunState:
        """Return the state whose `to_json` is `state`.

        Args:
            in_force, phase: after `history`, which is in the checkpoint's manifest.

        Raises:
            LookupError, TypeError, ValueError: `state` is not a result of `to_json`.
        """

        def read(key: str, kind: Any, default: object = msgspec.UNSET) -> Any:
            value = state[key] if default is msgspec.UNSET else state.get(key, default)
            return msgspec.convert(value, kind)

        progress: Counters = read("progress", Counters)
        evaluated_at: int = read("evaluated_at", int)
        return cls(
            in_force=in_force,
            phase=phase.restore(state["course"]) if "course" in state else phase,
            progress=progress,
            # an evaluation stays due if the run stopped between a step and its evaluation
            before=read("before", Counters),
            history=history,
            metrics=read("judgement", MetricState),
            evaluated_metrics=read("metrics", dict[str, float], {}),
            basis=read("basis", dict[str, str], {}),
            losses=read("losses", tuple[tuple[int, float], ...], ()),
            noise=read("noise", NoiseScale, {}),
            skips=Skips(read("skipped_in_a_row", int)),
            posted=read("posted", tuple[Posted, ...], ()),
            cancelled=read("cancelled", tuple[Cancelled, ...], ()),
            closed=read("closed", tuple[str, ...], ()),
            resumed_s=progress.active_s,
            evaluated_at=evaluated_at,
            judged_at=read("judged_at", int, evaluated_at),
            evaluation_checked_at=read("asked_at", int, evaluated_at),
            reevaluates_at=read("reevaluates_at", int, -1),
            save_checked_at=progress.step,
            sampled_at=read("sampled_at", int, progress.step),
        )
