"""What a run will be before it starts: its stages, their shapes, steps, FLOPs and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from instar.config.budget import parse_budget
from instar.config.clash import Clash
from instar.config.dump import in_yaml
from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.config.operation import Operation
from instar.config.schema import RunConfig
from instar.growth.operators import is_growth
from instar.models.memory import Still
from instar.models.shape import Growable, ParameterCount, count_parameters
from instar.schedule.checks import mistakes
from instar.schedule.entries import Entry, entries, too_large
from instar.schedule.operations import State, carried_out, fold, planned, when_due
from instar.schedule.pace import Pace, Spot
from instar.schedule.settings import Settings, is_frozen
from instar.schedule.timeline import Leg, Timeline, timeline
from instar.schedule.triggers import words
from instar.tasks.blueprint import Blueprint


@dataclass(frozen=True)
class Stage:
    """The run from one operation to the next; the first begins with the run."""

    operation: str
    """name and value; empty for the first"""
    label: str
    """how much of the function the operation keeps: exact, bounded, lossy; or nothing to keep"""
    when: str
    """its trigger in words"""
    first_step: int | None
    """at the earliest; None: the run ends before"""
    latest_step: int | None
    """at the latest; None: it may never come"""
    skipped: str
    """why the operation is passed over"""
    settings: Settings
    architecture: Growable
    style: tuple[tuple[str, tuple[str, ...]], ...]
    """the shape in words"""
    parameters: ParameterCount
    flops_per_token: int
    """or other unit of weight"""
    weight: int
    """of a sample: its tokens"""
    memory_bytes: dict[str, int]
    """by part, at the peak of a step on one rank"""
    batch_size: int
    """samples that a rank runs at once, at most"""
    steps_per_epoch: int | None


@dataclass(frozen=True)
class Totals:
    """What a run comes to."""

    steps: int
    samples: int
    tokens: int
    epochs: float | None
    flops: int


@dataclass(frozen=True)
class Forecast:
    """A run's stages and their sums."""

    stages: tuple[Stage, ...]
    world_size: int
    unit: str
    """what samples' weights count: tokens, graphs …"""
    dataset_tokens: int | None
    """or other units; None: the data are not made yet"""
    samples_per_epoch: int | None
    until: tuple[str, ...]
    early: Totals | None
    """where every operation comes at its earliest; None: only time or the loss ends the run"""
    late: Totals | None
    """where every operation comes at its latest"""

    @property
    def steps(self) -> int | None:
        """Steps after which the run has ended at the earliest."""
        ends = [each.steps for each in (self.early, self.late) if each is not None]
        return min(ends, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {**asdict(self), "steps": self.steps}


class ScheduleError(ValueError):
    """A schedule that this run could not carry out; `clashes` is what is wrong."""

    def __init__(self, *clashes: Clash) -> None:
        super().__init__("\n".join(clash.message for clash in clashes))
        self.clashes = clashes


def forecast(config: RunConfig, blueprint: Blueprint, world_size: int) -> Forecast:
    """The run that a config makes of a task on `world_size` ranks. No tensor is touched.

    Raises:
        ScheduleError: operations cannot be carried out.
        ValueError: text that is no budget.
    """
    if found := list(mistakes(config)):
        raise ScheduleError(*found)
    began = fold(config, blueprint.architecture, ())
    legs = _legs(config, began, blueprint, world_size)
    budgets = [parse_budget(text) for text in config.train.until]
    early, late = (
        timeline(
            legs,
            budgets,
            evaluated_at_start=config.eval.at_start,
            hopeful=hopeful,
            eval_epochs=config.eval.eval_epochs,
        )
        for hopeful in (True, False)
    )
    return Forecast(
        stages=tuple(
            _stage(
                config,
                blueprint,
                leg,
                _at(early, number),
                _at(late, number),
                world_size,
                _still(leg.state, [legs[n].state for n in range(number) if _lasts(late, n)]),
            )
            for number, leg in enumerate(legs)
        ),
        world_size=world_size,
        unit=blueprint.unit,
        dataset_tokens=blueprint.units(config.context),
        samples_per_epoch=legs[0].pace.samples_per_epoch,
        until=tuple(config.train.until),
        early=_totals(early),
        late=_totals(late),
    )


def checked_forecast(loaded: Loaded, blueprint: Blueprint, world_size: int) -> Forecast:
    """`forecast`, its mistakes told with the places of what the user wrote.

    Raises:
        ConfigError: the mistakes found.
    """
    try:
        return forecast(loaded.config, blueprint, world_size)
    except ScheduleError as error:
        problems = [loaded.problem(c.keys[0], c.message, c.hint) for c in error.clashes]
    raise ConfigError(*problems)


def _legs(config: RunConfig, began: State, blueprint: Blueprint, world_size: int) -> list[Leg]:
    """The run's legs. What operations make of it does not depend on the steps at which they come.

    Raises ScheduleError with all that is wrong, up to the first growth that is impossible: what
    follows it would stand on a model that there is not.
    """
    legs = [Leg(None, began, _pace(began, blueprint))]
    clashes: list[Clash] = []
    for entry in entries(config):
        try:
            legs.append(_leg(legs[-1].state, entry, blueprint, world_size))
        except ScheduleError as error:
            clashes += error.clashes
            if is_growth(entry.operation.name):
                break
    if clashes:
        raise ScheduleError(*clashes)
    return legs


def _leg(before: State, entry: Entry, blueprint: Blueprint, world_size: int) -> Leg:
    after, label = _tried(before, entry)
    skipped = _skipped(after, entry)
    if skipped:
        return Leg(entry, before, _pace(before, blueprint), skipped=skipped)
    _check_data(after, entry, blueprint, world_size)
    return Leg(entry, after, _pace(after, blueprint), label)


def _tried(state: State, entry: Entry) -> tuple[State, str]:
    """The state after an entry, and the label of what it does to the model."""
    state = when_due(state, entry.operation)
    try:
        after, plan = planned(state, entry.operation, 0)
    except ValueError as error:
        part = _faulty(state, entry.operation)
        raise _refused(entry, part, f"is not possible here: {error}") from None
    return after, "" if plan is None else plan.label


def _faulty(state: State, operation: Operation) -> str:
    """The part of an impossible operation that makes it so: an option without which it were not."""
    for option in operation.options:
        rest = {name: value for name, value in operation.options.items() if name != option}
        try:
            carried_out(state, replace(operation, options=rest), 0)
        except ValueError:
            continue
        return option
    return "name" if operation.value is None else "value"


def _skipped(grown: State, entry: Entry) -> str:
    """Why an entry that may be skipped is."""
    said = too_large(entry, grown.architecture)
    if said and entry.on_failure == "stop":
        hint = "on_failure: skip goes on without it"
        raise _refused(entry, "max_params", f"is exceeded: there would be {said}", hint)
    return said


def _check_data(state: State, entry: Entry, blueprint: Blueprint, world_size: int) -> None:
    """Raise ScheduleError if ranks would be without samples."""
    settings = state.settings
    if settings.global_batch < world_size:
        raise _refused(
            entry,
            "value",
            f"leaves some of {world_size} ranks without any of {settings.global_batch} samples at "
            "every step",
            f"keep batch_size × gradient_accumulation_steps at {world_size} or more",
        )
    tokens = blueprint.units(settings.context)
    if blueprint.unit == "token" and tokens is not None and tokens <= settings.context:
        raise _refused(
            entry,
            "value",
            f"makes samples of {settings.context:,} tokens, and there are {tokens:,} to train on",
        )


def _refused(entry: Entry, part: str, message: str, hint: str = "") -> ScheduleError:
    key = f"{entry.place}.{part}"
    return ScheduleError(Clash((key, entry.place), f"{key} {message}", hint))


def _pace(state: State, blueprint: Blueprint) -> Pace:
    context = state.settings.context
    return Pace(
        state.settings.global_batch,
        blueprint.weight(context),
        blueprint.samples(context),
        blueprint.flops(state.architecture, context),
    )


def _at(told: Timeline, number: int) -> int | None:
    return told.steps[number] if number < len(told.steps) else None


def _stage(
    config: RunConfig,
    blueprint: Blueprint,
    leg: Leg,
    early: int | None,
    late: int | None,
    world_size: int,
    still: Still,
) -> Stage:
    settings, architecture = leg.state.settings, leg.state.architecture
    elastic = config.reproducible == "elastic"
    slices = config.parallel.elastic.virtual_ranks if elastic else world_size
    batch_size = min(settings.batch_size, math.ceil(settings.global_batch / slices))
    size = leg.pace.samples_per_epoch
    return Stage(
        operation=described(leg.entry.operation) if leg.entry else "",
        label=leg.label,
        when=words(leg.entry.trigger) if leg.entry else "",
        first_step=early,
        latest_step=late,
        skipped=leg.skipped,
        settings=settings,
        architecture=architecture,
        style=tuple((label, tuple(lines)) for label, lines in blueprint.style(architecture)),
        parameters=count_parameters(architecture),
        flops_per_token=leg.pace.flops_per_token,
        weight=leg.pace.weight,
        memory_bytes=blueprint.memory(
            architecture,
            settings.context,
            batch_size,
            "cuda" if config.device.startswith("cuda") else "cpu",
            still,
        ),
        batch_size=batch_size,
        steps_per_epoch=None if size is None else -(-size // settings.global_batch),
    )


def _lasts(told: Timeline, number: int) -> bool:
    """Whether a leg has steps, as far as is known."""
    begins, ends = _at(told, number), _at(told, number + 1)
    return begins is None or ends is None or begins < ends


def _still(state: State, before: Sequence[State]) -> Still:
    """What does not train now, and of that, what did not in the legs before, by its name."""
    frozen = frozenset(
        name for name in state.architecture.parameters() if is_frozen(state.settings.frozen, name)
    )
    ever = (name for name in frozen if all(is_frozen(s.settings.frozen, name) for s in before))
    return Still(frozen, frozenset(ever))


def described(operation: Operation) -> str:
    """An operation in a line: "insert_layers 2, where start"."""
    name = operation.name
    first = name if operation.value is None else f"{name} {in_yaml(operation.value)}"
    return ", ".join(
        [first, *(f"{key} {in_yaml(each)}" for key, each in operation.options.items())]
    )


def _totals(told: Timeline) -> Totals | None:
    end: Spot | None = told.end
    if end is None:
        return None
    known = told.end_pace.samples_per_epoch is not None
    return Totals(
        steps=end.step,
        samples=end.samples,
        tokens=end.tokens,
        epochs=float(end.epochs(told.end_pace)) if known else None,
        flops=end.flops,
    )
