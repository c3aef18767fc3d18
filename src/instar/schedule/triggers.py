"""Triggers: conditions under which operations fire, as data, and their evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from instar.config.budget import Counters, parse_budget
from instar.config.schema import RunConfig
from instar.config.sections import Operation, ScheduledOperation, When
from instar.growth.operators import is_growth
from instar.models.shape import Growable, count_parameters, mask_of
from instar.record.format import si
from instar.schedule.branches import BRANCH, BRANCHED
from instar.schedule.curves import PER, PowerLaw
from instar.schedule.operations import Change, History, State


@dataclass(frozen=True)
class Moment:
    """A point between two steps at which triggers are evaluated."""

    counters: Counters
    """What the run has done; triggers read steps and tokens."""
    fraction: float | None
    """The largest used share of the counted budgets; None without one."""
    since_last: int
    """Steps since the last operation of the schedule, or since the run began."""
    loss: float | None
    """Validation loss in nats of an evaluation at this very step, else None."""
    losses: tuple[tuple[int, float], ...] = ()
    """(step, validation loss) of the evaluations so far, this one included; at least the last
    `losses_needed`."""
    has_changed: bool = False
    """Whether an operation of the schedule was carried out, or skipped, at this very step."""
    noise: float | None = None
    """Gradient noise scale as a multiple of the present global batch; None: not known."""
    flops_per_step: float = 0.0
    """FLOPs of a step of the present model; used with `losses` only."""


@dataclass(frozen=True)
class LossBelow:
    """Fires when the validation loss is less than `loss`, in nats."""

    loss: float


@dataclass(frozen=True)
class Waited:
    """Fires a number of steps after the last operation."""

    steps: int


@dataclass(frozen=True)
class AtStep:
    """Fires after a number of steps."""

    step: int


@dataclass(frozen=True)
class AtTokens:
    """Fires after a number of training tokens."""

    tokens: int


@dataclass(frozen=True)
class AtFraction:
    """Fires when a share of the run's budget is used up."""

    fraction: float


@dataclass(frozen=True)
class Plateau:
    """Fires when the validation loss fell by at most `slope` nats per 1,000 steps, by the
    least-squares line through `window` evaluations, at each of the last `patience`; all since the
    last operation."""

    window: int
    slope: float
    patience: int = 1


@dataclass(frozen=True)
class SlopeBelow:
    """Fires when the validation loss fell by at most `limit` per FLOP, by the least-squares line
    through `window` evaluations, at each of the last `patience`; all since the last operation.

    A model should grow when the larger one would learn more from the next FLOP: at the same loss, as
    this is where the grown model begins.
    """

    window: int
    limit: float | PowerLaw
    """Nats per 1e15 FLOPs; or another model's loss by FLOPs: its slope at the mean loss of these
    evaluations."""
    patience: int = 1

    def at(self, loss: float) -> float:
        """Return the bound in nats per 1e15 FLOPs while the loss is `loss`."""
        return self.limit.slope_at(loss) if isinstance(self.limit, PowerLaw) else self.limit


@dataclass(frozen=True)
class NoiseAbove:
    """Fires when the gradient noise scale is greater than a multiple of the global batch. It does not fire
    right after another operation, so that a repeated one is not carried out at once again."""

    multiple: float


@dataclass(frozen=True)
class AnyOf:
    """Fires when any of its triggers fires."""

    triggers: tuple[Trigger, ...]


@dataclass(frozen=True)
class AllOf:
    """Fires when all of its triggers fire."""

    triggers: tuple[Trigger, ...]


Trigger = (
    LossBelow
    | Waited
    | AtStep
    | AtTokens
    | AtFraction
    | Plateau
    | SlopeBelow
    | NoiseAbove
    | AnyOf
    | AllOf
)


def fires(trigger: Trigger, moment: Moment) -> str | None:
    """Return why the trigger fires now, e.g. "val 3.41 < 3.50"; None if it does not.

    A trigger that `needs_loss` fires only if the moment has a loss.
    """
    if needs_loss(trigger) and moment.loss is None:
        return None
    match trigger:
        case LossBelow(bound):
            loss = moment.loss
            return _less(loss, bound) if loss is not None and loss < bound else None
        case Waited(steps):
            return f"waited {steps:,} steps" if moment.since_last >= steps else None
        case AtStep(step):
            return f"step {step:,}" if moment.counters.step >= step else None
        case AtTokens(tokens):
            return f"{si(tokens)} tokens" if moment.counters.tokens >= tokens else None
        case AtFraction(fraction):
            return f"{fraction:.4g} of the budget" if _used(moment, fraction) else None
        case Plateau():
            return _flat(trigger, moment)
        case SlopeBelow():
            return _slow(trigger, moment)
        case NoiseAbove(multiple):
            noise = None if moment.has_changed else moment.noise
            if noise is None or noise <= multiple:
                return None
            return f"noise scale {noise:.3g} × the batch > {multiple:g}"
        case AnyOf(triggers):
            return next((why for part in triggers if (why := fires(part, moment))), None)
        case AllOf(triggers):
            reasons = [fires(part, moment) for part in triggers]
            reasons_met = [why for why in reasons if why is not None]
            return " and ".join(reasons_met) if len(reasons_met) == len(triggers) else None


def needs_loss(trigger: Trigger) -> bool:
    """Return whether the trigger can only be evaluated right after an evaluation of the model."""
    match trigger:
        case AnyOf(triggers) | AllOf(triggers):
            return any(map(needs_loss, triggers))
    return isinstance(trigger, LossBelow | Plateau | SlopeBelow | NoiseAbove)


def stays_due(trigger: Trigger) -> bool:
    """Return whether a trigger that fired would fire again at the same step, after its operation."""
    match trigger:
        case AnyOf(triggers):
            return any(map(stays_due, triggers))
        case AllOf(triggers):
            return all(map(stays_due, triggers))
        case Waited(steps):
            return steps == 0
    return isinstance(trigger, LossBelow | AtStep | AtTokens | AtFraction)


def losses_needed(trigger: Trigger) -> int:
    """Return the number of latest evaluations that the trigger depends on."""
    match trigger:
        case Plateau(window, _, patience) | SlopeBelow(window, _, patience):
            return window + patience - 1
        case AnyOf(triggers) | AllOf(triggers):
            return max(map(losses_needed, triggers), default=0)
        case LossBelow():
            return 1
    return 0


def words(trigger: Trigger) -> str:
    """Return the trigger as text: "val < 3.5 or 4,000 steps after the last operation"."""
    match trigger:
        case LossBelow(loss):
            return f"val < {loss:g}"
        case Waited(steps):
            return f"{steps:,} steps after the last operation"
        case AtStep(step):
            return f"at step {step:,}"
        case AtTokens(tokens):
            return f"after {si(tokens)} tokens"
        case AtFraction(fraction):
            return f"after {fraction:.4g} of the budget"
        case Plateau(window, slope, patience):
            often = f", {patience} times in a row" if patience > 1 else ""
            return (
                f"val falls by at most {slope:g} per 1,000 steps over {window} evaluations{often}"
            )
        case SlopeBelow(window, bound, patience):
            often = f", {patience} times in a row" if patience > 1 else ""
            over = f"over {window} evaluations{often}"
            if isinstance(bound, PowerLaw):
                return f"val falls per FLOP by at most as much {over} as {bound}"
            return f"val falls by at most {bound:g} nats per 1e15 FLOPs {over}"
        case NoiseAbove(multiple):
            return f"noise scale > {multiple:g} × the batch"
        case AnyOf(triggers):
            return " or ".join(_in_brackets(part, AllOf) for part in triggers)
        case AllOf(triggers):
            return " and ".join(_in_brackets(part, AnyOf) for part in triggers)


def _in_brackets(trigger: Trigger, kind: type[AnyOf | AllOf]) -> str:
    text = words(trigger)
    return f"({text})" if isinstance(trigger, kind) and len(trigger.triggers) > 1 else text


def _used(moment: Moment, fraction: float) -> bool:
    # rounding: 60 of 400 samples are a twentieth of 3 epochs, but 60 / 400 / 3 is less than 0.05
    share = moment.fraction
    return share is not None and (share >= fraction or math.isclose(share, fraction, rel_tol=1e-12))


def _less(loss: float, limit: float) -> str:
    """Format both with as many decimals as make them differ, at least two."""
    for digits in range(2, 10):
        if f"{loss:.{digits}f}" != f"{limit:.{digits}f}":
            break
    return f"val {loss:.{digits}f} < {limit:.{digits}f}"


def _flat(plateau: Plateau, moment: Moment) -> str | None:
    falls = [fall for fall, _ in _lines(plateau, moment)]
    if not falls or not all(fall <= plateau.slope for fall in falls):
        return None
    how = "rose" if falls[-1] < 0 else "fell"
    return f"val {how} {abs(falls[-1]):.2g} per 1,000 steps over {plateau.window} evaluations"


def _slow(trigger: SlopeBelow, moment: Moment) -> str | None:
    if moment.flops_per_step <= 0:
        return None
    per_flops = PER / (1000 * moment.flops_per_step)
    lines = [(fall * per_flops, trigger.at(mean)) for fall, mean in _lines(trigger, moment)]
    if not lines or not all(fall <= limit for fall, limit in lines):
        return None
    fall, limit_now = lines[-1]
    how = "rose" if fall < 0 else "fell"
    return (
        f"val {how} {abs(fall):.3g} per 1e15 FLOPs over {trigger.window} evaluations, "
        f"at most {limit_now:.3g}"
    )


def _lines(trigger: Plateau | SlopeBelow, moment: Moment) -> list[tuple[float, float]]:
    """Return the fall in nats per 1,000 steps, and the mean loss, of the least-squares lines through
    the windows that end at each of the last `patience` evaluations; nothing if there are fewer."""
    # losses at or before the last operation, or at step 0, are not part of the slope
    began = moment.counters.step - moment.since_last
    points = [point for point in moment.losses if point[0] > began]
    ends = range(len(points) - trigger.patience + 1, len(points) + 1)
    if ends[0] < trigger.window:
        return []
    return [_line(points[end - trigger.window : end]) for end in ends]


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Return the fall in nats per 1,000 steps of the least-squares line through (step, loss), and the
    mean loss."""
    middle = sum(step for step, _ in points) / len(points)
    mean = sum(loss for _, loss in points) / len(points)
    spread = sum((step - middle) ** 2 for step, _ in points)
    slope = (
        sum((step - middle) * (loss - mean) for step, loss in points) / spread if spread else 0.0
    )
    return -1000 * slope, mean


@dataclass(frozen=True)
class Entry:
    """One operation of a schedule."""

    number: int | None
    """The index in the schedule: entries are carried out in order, a repeated one several times; None: it is none
    of a schedule, somebody asked for it."""
    operation: Operation
    trigger: Trigger
    reevaluate: bool = False
    """Whether to evaluate immediately afterwards."""
    min_steps: int = 0
    """Minimal number of steps since the last operation."""
    max_params: int | None = None
    on_failure: Literal["stop", "skip"] = "stop"
    allow_inexact: bool = False
    """Whether to continue if an exact operation is measured to be inexact."""
    one_per_evaluation: bool = False
    """Whether the entry fires only at evaluations, and at most one such entry per evaluation: the
    behaviour of entries with `trigger_loss`."""

    @property
    def at_evaluations(self) -> bool:
        """Whether the entry can fire only right after an evaluation."""
        return self.one_per_evaluation or needs_loss(self.trigger)

    @property
    def place(self) -> str:
        """The entry's name in the config, or that of its operation."""
        return self.operation.name if self.number is None else f"schedule[{self.number}]"


def schedule_entries(config: RunConfig) -> tuple[Entry, ...]:
    """Return the operations of a config's schedule, an entry that is repeated as often; `checks.mistakes`
    must have validated it."""
    schedule = enumerate(config.schedule)
    return tuple(entry_of(number, entry) for number, entry in schedule for _ in range(entry.repeat))


def entry_of(number: int | None, config_entry: ScheduledOperation) -> Entry:
    """Return the entry of a schedule with its trigger; `number` is its index."""
    return Entry(
        number,
        operation(config_entry),
        trigger(config_entry),
        reevaluate=config_entry.reevaluate,
        min_steps=config_entry.min_steps or 0,
        max_params=config_entry.max_params,
        on_failure=config_entry.on_failure,
        allow_inexact=config_entry.allow_inexact,
        one_per_evaluation=config_entry.trigger_loss is not None,
    )


def evaluates_at_start(config: RunConfig) -> bool:
    """Return whether to evaluate before the first step: `eval.at_start`; by default if the model
    starts from other weights, or the schedule has entries with `trigger_loss`, which count this
    evaluation; a branch does not make its trunk evaluate."""
    if config.eval.at_start is not None:
        return config.eval.at_start
    entries = (entry for entry in config.schedule if entry.name != BRANCH)
    triggers = (entry.trigger_loss is not None for entry in entries)
    return config.starts_from is not None or any(triggers)


def operation(config_entry: ScheduledOperation) -> Operation:
    """Return an entry's operation; keys that are not the schedule's are its options."""
    return Operation(config_entry.name, config_entry.value, config_entry.model_extra or {})


def trigger(config_entry: ScheduledOperation) -> Trigger:
    """Return an entry's trigger: `when`, or its loss or wait condition, whichever holds first."""
    if config_entry.when is not None:
        return _when(config_entry.when)
    first: list[Trigger] = []
    if config_entry.trigger_loss is not None:
        first.append(LossBelow(config_entry.trigger_loss))
    if config_entry.max_wait_iters is not None:
        first.append(Waited(config_entry.max_wait_iters))
    return first[0] if len(first) == 1 else AnyOf(tuple(first))


_OF_ONE_VALUE: Mapping[str, Callable[[Any], Trigger]] = {
    "loss_below": LossBelow,
    "waited": Waited,
    "at_step": AtStep,
    "at_tokens": lambda count: AtTokens(tokens(count)),
    "at_fraction": AtFraction,
}


def _when(when: When) -> Trigger:
    values = ((make, getattr(when, name)) for name, make in _OF_ONE_VALUE.items())
    parts = [make(value) for make, value in values if value is not None]
    if (flat := when.plateau) is not None:
        parts.append(Plateau(flat.window, flat.slope, flat.patience))
    if (slow := when.slope_below) is not None:
        curve, slope = slow.curve, slow.slope or 0.0
        law = None if curve is None else PowerLaw(curve.floor, curve.flops, curve.exponent)
        parts.append(SlopeBelow(slow.window, slope if law is None else law, slow.patience))
    if when.noise_scale is not None:
        parts.append(NoiseAbove(when.noise_scale.above))
    if when.any is not None:
        parts.append(AnyOf(tuple(map(_when, when.any))))
    if when.all is not None:
        parts.append(AllOf(tuple(map(_when, when.all))))
    return parts[0] if len(parts) == 1 else AllOf(tuple(parts))


def tokens(value: int | str) -> int:
    """Parse a number of tokens, also text such as "50Mtok". Raises ValueError for other text."""
    if isinstance(value, int):
        return value
    budget = parse_budget(value)
    if budget.kind != "tokens":
        raise ValueError(f"{value!r} counts {budget.kind}; write tokens, such as 50Mtok")
    return int(budget.amount)


def remaining(schedule: Sequence[Entry], history: History) -> Sequence[Entry]:
    """Return the entries that were neither carried out nor skipped."""
    return schedule[sum(change.entry is not None for change in history) :]


def next_entry(schedule: Sequence[Entry], history: History) -> Entry | None:
    """Return the first entry that was neither carried out nor skipped."""
    return next(iter(remaining(schedule, history)), None)


def last_step(history: History) -> int | None:
    """Return the step of the schedule's last operation, skipped or not; None before the first.

    A branch is none in its trunk, which goes on as without it; a branch itself begins with one.
    """
    return max((change.step for change in history if _counts(change)), default=None)


def _counts(change: Change) -> bool:
    name = change.operation.name
    return name == BRANCHED or (change.is_wanted and not change.is_given_up and name != BRANCH)


def due(entry: Entry, moment: Moment, state: State) -> str | None:
    """Return why the entry is due now; None if it is not.

    Growth waits while a mask is open; the run folds masks by itself.
    """
    if moment.since_last < entry.min_steps:
        return None
    if entry.one_per_evaluation and (moment.loss is None or moment.has_changed):
        return None
    if is_growth(entry.operation.name) and mask_of(state.architecture) is not None:
        return None
    return fires(entry.trigger, moment)


def too_large(entry: Entry, architecture: Growable) -> str:
    """Return how the grown model exceeds the entry's limit on parameters; empty if it does not."""
    count = count_parameters(architecture).total
    if entry.max_params is None or count <= entry.max_params:
        return ""
    return f"{si(count)} parameters, more than max_params {si(entry.max_params)}"
