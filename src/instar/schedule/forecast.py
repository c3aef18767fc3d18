"""Forecast of a run: its stages with their shapes, steps, FLOPs and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from instar.config.budget import Budget, parse_budget
from instar.config.errors import ConfigError, ConfigProblem
from instar.config.fields import values, with_values
from instar.config.load import Loaded
from instar.config.origins import in_yaml
from instar.config.schema import CheckpointConfig, RunConfig
from instar.config.sections import Operation
from instar.config.torch_optim.schedulers import SCHEDULERS
from instar.growth.operators import is_growth
from instar.growth.plan import GrowthPlan
from instar.models.cost import FrozenParameters
from instar.models.shape import Growable, ParameterCount, count_parameters
from instar.record.format import interval_text
from instar.schedule.branches import BRANCH, Branch, read_branch
from instar.schedule.checks import mistakes
from instar.schedule.config_operations import changed_config
from instar.schedule.memory import (
    RankMemory,
    RankPlan,
    Strategy,
    in_force,
    rank_memory,
    shards_by_strategy,
    share_of,
)
from instar.schedule.operations import (
    RESTART_LR,
    State,
    carried_out,
    initial_state,
    override,
    plan_operation,
    when_due,
)
from instar.schedule.settings import ADJUST_BATCH, AVERAGE, Settings
from instar.schedule.timeline import (
    Beginning,
    Clock,
    Leg,
    Pace,
    PartialStep,
    Timeline,
    frozen_parameters,
    partial_steps,
    timeline,
)
from instar.schedule.triggers import (
    Entry,
    evaluates_at_start,
    schedule_entries,
    too_large,
    words,
)
from instar.tasks.task import TaskSpec

UNSEEN_EFFECTS = {
    BRANCH: "a branch starts here, in a folder of its own; the run itself goes on as before",
    ADJUST_BATCH: "the batch size is measured and set when the operation is carried out",
    AVERAGE: "the weights become the mean of the checkpoints",
    RESTART_LR.name: "the learning rate schedule restarts at this step",
}
"""What operations do although the settings of a forecast stay the same."""


@dataclass(frozen=True)
class Stage:
    """The run between two operations; the first stage begins with the run."""

    operation: str
    """The operation's name and value; empty for the first stage."""
    label: str
    """How well the operation preserves the model's function: exact, bounded or lossy; or empty."""
    when: str
    """The trigger as text."""
    first_step: int | None
    """The earliest step; None if the run ends before."""
    latest_step: int | None
    """The latest step; None if the operation may never fire."""
    skipped: str
    """The reason for skipping the operation; empty if it is carried out."""
    settings: Settings
    architecture: Growable
    style: tuple[tuple[str, tuple[str, ...]], ...]
    """The model's shape as text."""
    parameters: ParameterCount
    flops_per_token: int
    """FLOPs per token, or per other unit of weight."""
    weight: float
    """The weight of a sample: its targets, on the mean."""
    memory: Mapping[Strategy, RankMemory]
    """Memory of a rank under each strategy that this number of ranks could use."""
    memory_bytes: Mapping[str, int]
    """Peak memory of a step on one rank in bytes, by part, under the strategy of the config."""
    batch_size: int
    """The maximal number of samples that a rank runs at once."""
    steps_per_epoch: int | None
    left_out: int
    """Samples that every epoch leaves out, see `data.drop_last`."""
    config_changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Keys of the config that the operation changes, with their values before and after."""
    is_idle: bool = False
    """Whether the operation changes nothing."""
    early: Totals | None = None
    """Its own totals if every operation fires at its earliest; None: it is not reached, or has no known end."""
    late: Totals | None = None
    """Its own totals if every operation fires at its latest."""


@dataclass(frozen=True)
class Totals:
    """Totals of a run, or of a stage."""

    steps: int
    samples: int
    tokens: int
    epochs: float | None
    """None: unknown, and of a stage."""
    flops: int

    def since(self, clock: Clock) -> Totals:
        """Return the totals without those at a moment before."""
        return Totals(
            self.steps - clock.step,
            self.samples - clock.samples,
            self.tokens - clock.tokens,
            None,
            self.flops - clock.flops,
        )


@dataclass(frozen=True)
class BranchForecast:
    """A branch: what it does after its first step, which is the trunk's."""

    name: str
    first_step: int | None
    """The earliest step; None if the run ends before."""
    latest_step: int | None
    """The latest step; None if it may never begin."""
    iters: int
    decay: int
    parameters: ParameterCount
    """At its end."""
    early: Totals | None
    """Its own totals, without the trunk's, if every operation fires at its earliest."""
    late: Totals | None


@dataclass(frozen=True)
class Forecast:
    """A run's stages and totals."""

    stages: tuple[Stage, ...]
    world_size: int
    unit: str
    """The unit of samples' weights: tokens, graphs …"""
    weight_remark: str
    """What is to be said of the weights, such as that they are upper bounds; or empty."""
    dataset_tokens: int | None
    """The size of the training data in that unit; None if they are not prepared yet."""
    samples_per_epoch: int | None
    splits: Mapping[str, int | None]
    """Samples of each split; None if unknown."""
    drawing: str
    """How training samples are drawn, in words; empty: as `data.order` says."""
    saves: tuple[str, ...]
    """When checkpoints are saved, in words."""
    until: tuple[str, ...]
    early: Totals | None
    """Totals if every operation fires at its earliest; None: only time or the loss ends it."""
    late: Totals | None
    """Totals if every operation fires at its latest."""
    branches: tuple[BranchForecast, ...] = ()
    partial_steps: tuple[PartialStep, ...] = ()

    def peak_bytes(self, strategy: Strategy) -> int:
        """Return the highest memory of a rank in the whole run, in bytes."""
        return max(stage.memory[strategy].peak for stage in self.stages)

    @property
    def steps(self) -> int | None:
        """The smallest number of steps after which the run ends."""
        ends = [totals.steps for totals in (self.early, self.late) if totals is not None]
        return min(ends, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {**asdict(self), "steps": self.steps}


class ScheduleError(ValueError):
    """A schedule that the run cannot carry out, with its `problems`."""

    def __init__(self, *problems: ConfigProblem) -> None:
        super().__init__("\n".join(problem.message for problem in problems))
        self.problems = problems


def forecast(config: RunConfig, spec: TaskSpec, world_size: int) -> Forecast:
    """Forecast the run of a config and a task on `world_size` ranks, without creating tensors.

    Raises:
        ScheduleError: operations cannot be carried out.
        ValueError: a budget cannot be parsed.
    """
    if problems := list(mistakes(config)):
        raise ScheduleError(*problems)
    without_end = _forecast(config, spec, world_size)
    end = decay_end(config, without_end.steps)
    if end is None or not config.schedule:
        return without_end
    # operations on the warm-up scale the decay too; no step depends on the rate
    return _forecast(with_values(config, {"learning_rate.lr_decay_iters": end}), spec, world_size)


def decay_end(config: RunConfig, steps: int | None) -> int | None:
    """Return the step at which the decay of the learning rate ends in a run of so many steps, if the
    config leaves it open; None: it does not, or the steps are unknown."""
    schedule = config.learning_rate
    if steps is None or schedule.lr_decay_iters is not None or schedule.shape in SCHEDULERS:
        return None
    # a run shorter than its warm-up still needs a valid learning-rate schedule
    return max(steps, schedule.warmup_iters + 1)


def _forecast(config: RunConfig, spec: TaskSpec, world_size: int) -> Forecast:
    began = initial_state(config, spec.architecture, spec.facts)
    legs = legs_of(schedule_entries(config), began, spec, world_size)
    lines = timelines(legs, config, Beginning(is_evaluated=evaluates_at_start(config)))
    branches = _branches(config, spec, legs, lines, world_size)
    return replace(forecast_of(legs, lines, spec, world_size), branches=tuple(branches))


def timelines(
    legs: Sequence[Leg], config: RunConfig, beginning: Beginning
) -> tuple[Timeline, Timeline]:
    """Return what comes if every operation fires at its earliest, and at its latest."""
    budgets = [parse_budget(text) for text in config.train.until]
    early, late = (
        timeline(
            legs,
            budgets,
            beginning,
            optimistic=optimistic,
            eval_epochs=config.eval.eval_epochs,
        )
        for optimistic in (True, False)
    )
    return early, late


@dataclass(frozen=True)
class PastStage:
    """What a run had been from an operation to the next."""

    state: State
    plan: GrowthPlan | None
    """The growth at its beginning, if any."""
    has_steps: bool


def forecast_of(
    legs: Sequence[Leg],
    lines: tuple[Timeline, Timeline],
    spec: TaskSpec,
    world_size: int,
    past: Sequence[PastStage] = (),
) -> Forecast:
    """Forecast legs whose moments are known.

    Args:
        past: stages of the run up to its first leg, in the last of which that one is.
    """
    early, late = lines
    config, pace = legs[0].state.config, legs[0].pace
    behind = [Leg(None, stage.state, pace, stage.plan) for stage in past] or [legs[0]]
    whole, offset = [*behind, *legs[1:]], len(behind) - 1
    past_steps = [number for number, stage in enumerate(past) if stage.has_steps]
    stages: list[Stage] = []
    for number, leg in enumerate(legs):
        with_steps = {*past_steps, *(offset + n for n in range(number) if _has_steps(late, n))}
        stages.append(
            _stage(
                config,
                spec,
                leg,
                _first_step(early, number),
                _first_step(late, number),
                world_size,
                frozen_parameters(whole, offset + number, with_steps),
                stages[-1] if stages else None,
            )
        )
    stages = [
        replace(stage, early=_totals_of_leg(early, number), late=_totals_of_leg(late, number))
        for number, stage in enumerate(stages)
    ]
    return Forecast(
        stages=tuple(stages),
        world_size=world_size,
        unit=spec.unit,
        weight_remark=spec.weight_remark(config.context),
        dataset_tokens=spec.units(config.context),
        samples_per_epoch=legs[0].pace.samples_per_epoch,
        splits=spec.split_sizes(config.context),
        drawing=spec.drawing,
        saves=tuple(_saves(config.checkpoint, stages[0].steps_per_epoch)),
        until=tuple(config.train.until),
        early=_totals(early),
        late=_totals(late),
        partial_steps=tuple({step: None for line in lines for step in partial_steps(line, legs)}),
    )


def _saves(config: CheckpointConfig, steps_per_epoch: int | None) -> Iterator[str]:
    """Yield when checkpoints are saved, beside the end of the run."""
    for unit, count in config.intervals.items():
        steps = unit == "epochs" and steps_per_epoch and count * steps_per_epoch
        yield interval_text(count, unit) + (f" ({steps:,} steps)" if steps else "")
    if config.every_minutes is not None:
        yield f"every {config.every_minutes:g} min"
    if config.on_best:
        yield f"at the best {', '.join(config.best_of)}"
    if config.on_growth:
        yield "after growth"


def checked_forecast(loaded_config: Loaded, spec: TaskSpec, world_size: int) -> Forecast:
    """Forecast a loaded config; problems are reported with their places in the user's files.

    Raises:
        ConfigError: with all problems.
    """
    try:
        return forecast(loaded_config.config, spec, world_size)
    except ScheduleError as error:
        problems = [loaded_config.problem(c.keys[0], c.message, c.hint) for c in error.problems]
    raise ConfigError(*problems)


def legs_of(
    schedule: Sequence[Entry], initial: State, spec: TaskSpec, world_size: int
) -> list[Leg]:
    """Return the legs of a run from a state on; the effects of operations do not depend on when they fire.

    Raises ScheduleError with all problems up to the first impossible growth: later operations would
    apply to a model that does not exist.
    """
    legs = [Leg(None, initial, pace_of(initial, spec))]
    problems: list[ConfigProblem] = []
    for entry in schedule:
        try:
            legs.append(_leg(legs[-1].state, entry, spec, world_size))
        except ScheduleError as error:
            problems += error.problems
            if is_growth(entry.operation.name):
                break
    if problems:
        raise ScheduleError(*problems)
    return legs


def _branches(
    config: RunConfig,
    spec: TaskSpec,
    legs: Sequence[Leg],
    timelines: tuple[Timeline, Timeline],
    world_size: int,
) -> Iterator[BranchForecast]:
    """Yield the branches of a run.

    Raises:
        ScheduleError: one cannot begin before the run ends, or cannot carry out its own schedule.
    """
    for number, leg in enumerate(legs):
        entry = leg.entry
        if entry is None or entry.operation.name != BRANCH:
            continue
        early, late = (_clock_at(line, number) for line in timelines)
        if early is None:
            end = timelines[0].end
            when = f" after {end.step:,} steps" if end is not None else ""
            text = f"{entry.place} cannot begin: the run ends{when} before it"
            hint = "trigger it earlier, or give the run a later end"
            raise ScheduleError(ConfigProblem((entry.place,), text, hint))
        branch = read_branch(entry.operation)
        try:
            branch_legs = _branch_legs(config, spec, leg, branch, early.step, world_size)
        except ScheduleError as error:
            problems = (
                ConfigProblem((entry.place,), f"{entry.place}: in the branch, {p.message}", p.hint)
                for p in error.problems
            )
            raise ScheduleError(*problems) from None
        yield BranchForecast(
            branch.name,
            early.step,
            None if late is None else late.step,
            branch.iters,
            branch.decay,
            count_parameters(branch_legs[-1].state.architecture),
            _own_totals(branch_legs, branch, early, optimistic=True),
            None if late is None else _own_totals(branch_legs, branch, late, optimistic=False),
        )


def _branch_legs(
    config: RunConfig, spec: TaskSpec, leg: Leg, branch: Branch, step: int, world_size: int
) -> list[Leg]:
    assert leg.entry is not None
    changes = branch.changes(step)
    state = carried_out(leg.state, override(changes, {}), step)
    check_data(state, leg.entry, spec, world_size)
    return legs_of(schedule_entries(with_values(config, changes)), state, spec, world_size)


def _own_totals(
    legs: Sequence[Leg], branch: Branch, start: Clock, *, optimistic: bool
) -> Totals | None:
    """Return the totals of a branch from `start` on."""
    config = legs[0].state.config
    end = timeline(
        legs,
        [Budget("steps", start.step + branch.iters)],
        Beginning(start, since=start.step),
        optimistic=optimistic,
        eval_epochs=config.eval.eval_epochs,
    )
    totals = _totals(end)
    return None if totals is None else totals.since(start)


def _leg(before: State, entry: Entry, spec: TaskSpec, world_size: int) -> Leg:
    """Return the leg that begins with an entry: as a run carries it out, or skips it if it may."""
    state = when_due(before, entry.operation)
    plan: GrowthPlan | None = None
    try:
        after, plan = plan_operation(state, entry.operation, 0)
        reason = _skip_reason(after, entry)
        if not reason:
            check_data(after, entry, spec, world_size)
    except ValueError as error:
        if entry.on_failure == "stop":
            if isinstance(error, ScheduleError):
                raise
            part = _faulty(state, entry.operation)
            raise _schedule_error(entry, part, f"is not possible here: {error}") from None
        reason = str(error)
    if reason:
        return Leg(entry, before, pace_of(before, spec), skip_reason=reason)
    changes = {
        key: (values(state.config)[key], value)
        for key, value in changed_config(state.config, after.config).items()
    }
    is_idle = plan is None and after == state and entry.operation.name not in UNSEEN_EFFECTS
    return Leg(entry, after, pace_of(after, spec), plan, config_changes=changes, is_idle=is_idle)


def _faulty(state: State, operation: Operation) -> str:
    """Return the part at fault: an option without which the operation is possible, or the value."""
    for option in operation.options:
        options = {name: value for name, value in operation.options.items() if name != option}
        try:
            carried_out(state, replace(operation, options=options), 0)
        except ValueError:
            continue
        return option
    return "name" if operation.value is None else "value"


def _skip_reason(larger: State, entry: Entry) -> str:
    """Return the reason for skipping an entry, or ""."""
    reason = too_large(entry, larger.architecture)
    if reason and entry.on_failure == "stop":
        hint = "on_failure: skip continues without it"
        raise _schedule_error(entry, "max_params", f"is exceeded: there would be {reason}", hint)
    return reason


def check_data(state: State, entry: Entry, spec: TaskSpec, world_size: int) -> None:
    """Raise ScheduleError if a rank would have no samples after an entry."""
    settings = state.settings
    if settings.global_batch < world_size:
        raise _schedule_error(
            entry,
            "value",
            f"leaves some of {world_size} ranks without any of {settings.global_batch} samples at "
            "every step",
            f"keep batch_size × gradient_accumulation_steps at {world_size} or more",
        )
    samples = spec.samples(settings.context)
    if state.config.data.drop_last and samples is not None and samples < settings.global_batch:
        raise _schedule_error(
            entry,
            "value",
            f"leaves out every sample, by data.drop_last: an epoch has {samples:,} samples, fewer than a global "
            f"batch of {settings.global_batch:,}",
        )
    tokens = spec.units(settings.context)
    if spec.unit == "token" and tokens is not None and tokens <= settings.context:
        raise _schedule_error(
            entry,
            "value",
            f"needs samples of {settings.context:,} tokens, but the training data has {tokens:,}",
        )


def _schedule_error(entry: Entry, part: str, message: str, hint: str = "") -> ScheduleError:
    key = f"{entry.place}.{part}"
    return ScheduleError(ConfigProblem((key, entry.place), f"{key} {message}", hint))


def pace_of(state: State, spec: TaskSpec) -> Pace:
    """Return what every step of a state consumes and costs."""
    context = state.settings.context
    return Pace(
        state.settings.global_batch,
        spec.weight(context),
        spec.samples(context),
        spec.flops(state.architecture, context),
        state.config.data.drop_last,
        _basis(state, spec),
        (float(context), *state.settings.mixture),
    )


def _basis(state: State, spec: TaskSpec) -> tuple[int | None, ...]:
    """Return what an evaluation depends on: tokens per sample, rows of the vocabulary, and the number of
    samples, None: all."""
    config, context = state.config, state.config.eval.context or state.settings.context
    iters, limit = state.settings.eval_iters, None
    if iters is not None:
        limit, total = iters * config.train.batch_size, spec.split_sizes(context).get("val")
        limit = None if total is not None and limit >= total else limit
    return context, state.architecture.sizes().get("vocab"), limit


def _clock_at(timeline: Timeline, number: int) -> Clock | None:
    return timeline.starts[number] if number < len(timeline.starts) else None


def _first_step(timeline: Timeline, number: int) -> int | None:
    clock = _clock_at(timeline, number)
    return None if clock is None else clock.step


def forecast_change(
    state: State, entry: Entry, spec: TaskSpec, world_size: int
) -> tuple[Stage, Stage]:
    """Return the present stage of a run, and that after an operation.

    Raises:
        ScheduleError: it is not possible.
    """
    entry = replace(entry, on_failure="stop")
    legs, stages = legs_of((entry,), state, spec, world_size), list[Stage]()
    for number, leg in enumerate(legs):
        frozen = frozen_parameters(legs, number, range(number))
        before = stages[-1] if stages else None
        stages.append(_stage(state.config, spec, leg, None, None, world_size, frozen, before))
    before, after = stages
    return before, after


def _stage(
    config: RunConfig,
    spec: TaskSpec,
    leg: Leg,
    early: int | None,
    late: int | None,
    world_size: int,
    frozen_parameters: FrozenParameters,
    before: Stage | None,
) -> Stage:
    settings, architecture = leg.state.settings, leg.state.architecture
    share = share_of(config, settings, world_size)
    model_memory = spec.memory(
        architecture,
        settings.context,
        share.batch_size,
        "cuda" if config.device.startswith("cuda") else "cpu",
        frozen_parameters,
    )
    memory = {
        strategy: rank_memory(
            RankPlan(config, architecture, frozen_parameters, world_size, strategy, shards, share),
            model_memory,
            before.memory[strategy] if before and leg.plan is not None else None,
        )
        for strategy, shards in shards_by_strategy(config, world_size).items()
    }
    return Stage(
        operation=operation_line(leg.entry.operation) if leg.entry else "",
        label=leg.label,
        when=words(leg.entry.trigger) if leg.entry else "",
        first_step=early,
        latest_step=late,
        skipped=leg.skip_reason,
        settings=settings,
        architecture=architecture,
        style=tuple((label, tuple(lines)) for label, lines in spec.style(architecture)),
        parameters=count_parameters(architecture),
        flops_per_token=leg.pace.flops_per_token,
        weight=leg.pace.weight,
        memory=memory,
        memory_bytes=memory[in_force(config, world_size)].step,
        batch_size=share.batch_size,
        steps_per_epoch=leg.pace.steps_per_epoch,
        left_out=leg.pace.left_out,
        config_changes=leg.config_changes,
        is_idle=leg.is_idle,
    )


def _has_steps(timeline: Timeline, number: int) -> bool:
    """Return whether a leg has steps, as far as is known."""
    begin, end = _first_step(timeline, number), _first_step(timeline, number + 1)
    return begin is None or end is None or begin < end


def operation_line(operation: Operation) -> str:
    """Return an operation as one line: "insert_layers 2, where start"."""
    name = operation.name
    first = name if operation.value is None else f"{name} {in_yaml(operation.value)}"
    return ", ".join(
        [first, *(f"{key} {in_yaml(option)}" for key, option in operation.options.items())]
    )


def _totals(timeline: Timeline) -> Totals | None:
    end: Clock | None = timeline.end
    if end is None:
        return None
    has_epochs = timeline.end_pace.samples_per_epoch is not None
    return _totals_at(end, float(end.epochs(timeline.end_pace)) if has_epochs else None)


def _totals_of_leg(timeline: Timeline, number: int) -> Totals | None:
    """Return the totals of a leg alone; None: it is not reached, or its end is not known."""
    begin, end = _clock_at(timeline, number), _clock_at(timeline, number + 1) or timeline.end
    return None if begin is None or end is None else _totals_at(end, None).since(begin)


def _totals_at(clock: Clock, epochs: float | None) -> Totals:
    return Totals(clock.step, clock.samples, clock.tokens, epochs, clock.flops)
