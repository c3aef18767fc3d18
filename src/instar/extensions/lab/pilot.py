"""Pilots: short runs of a config, from which the saving of its schedule of growth is predicted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from instar.config.errors import ConfigError
from instar.config.schema import RunConfig
from instar.config.sections import ScheduledOperation
from instar.config.torch_optim.schedulers import with_steps
from instar.distributed.failure import RunFailed
from instar.extensions.lab import short_runs
from instar.extensions.lab.expected import expected_saving
from instar.extensions.lab.pilot_file import (
    Pilot,
    PilotCase,
    PilotModel,
    PilotRun,
    pilot_path,
    read_pilot,
    settings_of,
    write_json,
)
from instar.extensions.lab.saving import ExpectedSaving, pilot_summary, spending
from instar.extensions.lab.short_runs import MeasuredConfig, ShortRunRequest
from instar.growth.operators import is_growth
from instar.schedule.branches import BRANCH
from instar.schedule.forecast import Forecast

_SMALL = 1.25
"""Steps of the size that the schedule begins with, relative to the longest of the final size."""
_MOSTLY = 0.6
"""Share of a run that cosine and linear rates are taken to be near their peak."""
MUST = 3
"""The runs of a seed without which nothing can be predicted: the first ones."""


@dataclass(frozen=True)
class PilotResult:
    """A pilot, and what it predicts for the config."""

    pilot: Pilot
    saving: ExpectedSaving
    file: Path


def run_pilot(request: ShortRunRequest) -> PilotResult:
    """Run what is missing of a pilot, and write its file after each run.

    The runs are ordinary ones, `<name>-pilot-…` in the config's folder of runs: the final size from
    scratch, half as long and as long as the pilot's horizon; the config's own run with its schedule,
    shortened to this horizon; and its first size without growth, a little longer, at a stable rate.
    Decay, moments of growth and evaluations are shortened in proportion. A pilot that was interrupted
    goes on; its horizon is chosen at the first call.

    Raises:
        ConfigError: the config has no schedule of growth, or is of a kind that pilots do not know;
            the budget is too small; the file is another pilot's.
        RunFailed, Interrupted: see `launch`; the same call goes on.
    """
    start = time.monotonic()
    measurement = short_runs.prepare_measurement(request)
    _check_growth(measurement)
    file = request.out or pilot_file(request.config, measurement.config)
    if file.exists():
        plan = read_pilot(file)
        _check_same(file, plan, measurement)
    else:
        plan = _plan(measurement, request)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, plan)
    slowest = 0.0
    for number, case in enumerate(plan.missing):
        elapsed_s = time.monotonic() - start
        if number >= MUST and elapsed_s + slowest > request.budget_s:
            request.say(
                f"the budget is used up: {len(plan.missing)} runs are left for the next call"
            )
            break
        request.say(f"pilot: {case.name}, run {len(plan.runs) + 1} of {len(plan.cases)}")
        pilot_run = _run(measurement, plan, case)
        slowest = max(slowest, time.monotonic() - start - elapsed_s)
        plan = structs.replace(plan, runs=(*plan.runs, pilot_run))
        plan = structs.replace(plan, found=pilot_summary(plan))
        write_json(file, plan)
    saving = expected_saving(measurement.forecast, measurement.loaded_config, request.config, file)
    if not isinstance(saving, ExpectedSaving):
        raise ConfigError.of("has no runs to predict from", str(file))
    return PilotResult(plan, saving, file)


def pilot_file(path: str | None, config: RunConfig) -> Path:
    """Return where a pilot's file is if nobody says where: beside the config, or among the runs."""
    return pilot_path(Path(config.record.out_dir) / config.name if path is None else path)


def _check_growth(measurement: MeasuredConfig) -> None:
    """Raise ConfigError for schedules that pilots do not know."""
    for number, entry in enumerate(measurement.config.schedule):
        if entry.name == "set_context" or "lora" in entry.name:
            key, hint = f"schedule[{number}]", "leave it out"
            raise short_runs.refusal(
                measurement.loaded_config, key, f"{entry.name} is not known to pilots", hint
            )
    if len({stage.architecture for stage in measurement.forecast.stages}) < 2:
        hint = "add an operation such as stack_layers"
        raise short_runs.refusal(measurement.loaded_config, "schedule", "grows no model", hint)


def _plan(measurement: MeasuredConfig, request: ShortRunRequest) -> Pilot:
    """Choose the runs that the budget allows, by the time of a few steps."""
    config, forecast = measurement.config, measurement.forecast
    steps, seeds = request.steps, request.seeds or (config.seed,)
    first, last = forecast.stages[0], forecast.stages[-1]
    times = [
        measurement.seconds([*_model(measurement, stage), "schedule=[]"], request.say)
        for stage in (0, len(forecast.stages) - 1)
    ]
    small, final = (
        PilotModel(stage.parameters.total, stage.flops_per_token, step_s)
        for stage, (step_s, _) in zip((first, last), times, strict=True)
    )
    shares = _moments(forecast)
    longer = _SMALL if config.learning_rate.shape in ("wsd", "constant") else 0.0
    ratio = min(1.0, small.seconds_per_step / final.seconds_per_step)
    costs = [1.0, 0.5, 1 - shares[-1] * (1 - ratio), longer * ratio]
    count = len(seeds) * len(costs)
    seconds = short_runs.BUDGET_USED * request.budget_s - count * short_runs.START_S
    per_step = len(seeds) * sum(costs) * final.seconds_per_step * (1 + short_runs.EVALUATED)
    if steps is None:
        steps = int(min(measurement.run_steps, seconds / per_step))
    if steps < 2 * short_runs.FEWEST_STEPS:
        needed_s = (
            2 * short_runs.FEWEST_STEPS * per_step + count * short_runs.START_S
        ) / short_runs.BUDGET_USED
        raise short_runs.too_short(
            f"{count} runs of at least {short_runs.FEWEST_STEPS} steps", request.budget_s, needed_s
        )
    cases: list[PilotCase] = []
    for seed in seeds:
        cases += [
            PilotCase("final", seed, steps // 2),
            PilotCase("final", seed, steps),
            PilotCase(
                "grown", seed, steps, tuple(max(1, round(share * steps)) for share in shares)
            ),
            *([PilotCase("small", seed, round(longer * steps))] if longer else []),
        ]
    return Pilot(
        name=config.name,
        settings=settings_of(config),
        growth=tuple(s.operation for s in forecast.stages[1:] if is_growth(s.operation.split()[0])),
        run_steps=measurement.run_steps,
        stable_share=_stable_share(config),
        tokens_per_step=float(first.settings.global_batch * first.weight),
        small=small,
        final=final,
        cases=tuple(cases),
        evaluations=short_runs.evaluations(steps, *times[1]),
    )


def _moments(forecast: Forecast) -> list[float]:
    """Return the shares of the run after which the model grows; those that depend on a loss, which
    nobody knows yet, evenly between the others."""
    run_steps = forecast.steps or 1
    growth_stages = [
        after
        for before, after in zip(forecast.stages, forecast.stages[1:], strict=False)
        if before.architecture != after.architecture
    ]
    earliest = {
        number: stage.first_step / run_steps
        for number, stage in enumerate(growth_stages)
        if stage.first_step is not None and stage.first_step == stage.latest_step
    }
    shares: list[float] = []
    for number in range(len(growth_stages)):
        before = shares[-1] if shares else 0.0
        after = next(
            (earliest[n] for n in range(number, len(growth_stages)) if n in earliest), None
        )
        if number in earliest:
            shares.append(earliest[number])
        elif after is not None:
            shares.append((before + after) / 2)
        else:
            shares.append(before + (0.8 - before) * (number + 1) / len(growth_stages))
    return shares


def _stable_share(config: RunConfig) -> float:
    schedule = config.learning_rate
    if schedule.shape == "wsd":
        return 1 - schedule.decay_fraction
    return _MOSTLY if schedule.has_end else 1.0


def _model(measurement: MeasuredConfig, stage: int) -> list[str]:
    """Return settings of a run that begins with the shape of a stage."""
    shapes = (short_runs.shape_of_stage(measurement, number) for number in (0, stage))
    return short_runs.options(short_runs.shape_settings(*shapes)) if stage else []


def _settings(measurement: MeasuredConfig, plan: Pilot, case: PilotCase) -> list[str]:
    """Return the settings of a case, beside those of the config."""
    config = measurement.config
    horizon = max(case_of_plan.steps for case_of_plan in plan.cases if case_of_plan.arm == "final")
    share = (horizon if case.arm == "small" else case.steps) / plan.run_steps
    schedule = config.learning_rate
    counts: dict[str, int | None] = {
        "learning_rate.warmup_iters": min(schedule.warmup_iters, horizon // short_runs.WARMUP),
        "learning_rate.lr_decay_iters": _scaled(schedule.lr_decay_iters, share),
        "learning_rate.decay_every": _scaled(schedule.decay_every, share),
        "eval.eval_interval": max(1, case.steps // plan.evaluations),
    }
    folder = Path(config.record.out_dir) / f"{config.name}-pilot-{case.name}"
    values: dict[str, Any] = {
        **{key: value for key, value in counts.items() if value is not None},
        **short_runs.run_values(config, "pilot", folder, case.steps, case.seed),
    }
    if options := with_steps(
        schedule.shape, schedule.options, lambda step: max(1, round(step * share))
    ):
        values["learning_rate.options"] = options
    entries: list[dict[str, Any]] = []
    grown_at = list(case.grown_at)
    stages = measurement.forecast.stages
    for before, stage, entry in zip(stages, stages[1:], config.schedule, strict=False):
        options_of_entry = entry.model_dump(
            exclude={*ScheduledOperation.model_fields} - {"name", "value"}
        )
        if entry.name == BRANCH:
            continue
        if stage.architecture == before.architecture:
            step = round((stage.first_step or plan.run_steps) * share)
        elif grown_at:
            step = grown_at.pop(0)
        else:
            continue
        entries.append({**options_of_entry, "when": {"at_step": step}})
    values["schedule"] = entries
    if case.arm == "small":
        values |= {"learning_rate.shape": "constant", "learning_rate.options": {}}
    model = _model(measurement, len(stages) - 1) if case.arm == "final" else []
    return [*model, *short_runs.options(values)]


def _scaled(iters: int | None, share: float) -> int | None:
    return None if iters is None else max(1, round(iters * share))


def _run(measurement: MeasuredConfig, plan: Pilot, case: PilotCase) -> PilotRun:
    """Train a case, or go on with it, and read how it ended."""
    settings = _settings(measurement, plan, case)
    path = short_runs.train_or_resume(
        measurement, measurement.path, [*measurement.overrides, *settings], "pilot"
    )
    loss = short_runs.loss_at_end(path, case.steps)
    if loss is None:
        raise RunFailed(
            f"{path}: did not end at step {case.steps:,} with a loss, so nothing can be predicted from "
            "it; delete it to try again"
        )
    return PilotRun(
        case, loss, spending(measurement.forecast_of(settings)), short_runs.losses_of(path)
    )


def _check_same(file: Path, plan: Pilot, measurement: MeasuredConfig) -> None:
    """Raise ConfigError if a pilot that is not whole is about another config."""
    different_keys = plan.differing(measurement.config)
    if different_keys and plan.missing:
        message = f"was begun with other settings of {', '.join(different_keys)}"
        raise ConfigError.of(message, str(file), "choose another file with -o, or delete this one")
