"""Pilots: short runs of a config, from which the saving of its schedule of growth is predicted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash
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
    schedule_of,
    settings_of,
    write_json,
)
from instar.extensions.lab.saving import ExpectedSaving, pilot_summary, spending
from instar.extensions.lab.short_runs import MeasuredConfig, Say, ShortRunRequest
from instar.growth.operators import is_growth
from instar.schedule.branches import BRANCH
from instar.schedule.forecast import Forecast, Stage

_SMALL = 1.25
"""Steps of the size that the schedule begins with, relative to the longest of the final size."""
_MOSTLY = 0.6
"""Share of a run that cosine and linear rates are taken to be near their peak."""
_LEFT_OUT = (BRANCH, "change_eval_interval", "set_eval_interval")
"""Operations that have no part in a pilot."""
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
            the budget is too small; the file is another pilot's, or one of other steps or seeds.
        RunFailed, Interrupted: see `launch`; the same call goes on.
    """
    start = time.monotonic()
    measurement = short_runs.prepare_measurement(request)
    _check_growth(measurement)
    file = request.out or pilot_file(request.config, measurement.config)
    if file.exists():
        plan = read_pilot(file)
        short_runs.check_begun(file, request, plan.horizon, [case.seed for case in plan.cases])
        _check_same(file, plan, measurement, request.say)
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
    for key, _, before, stage in _operations(measurement):
        if stage.first_step is None and stage.architecture != before.architecture:
            text, hint = "grows the model after the end of the run", "trigger it earlier"
            raise short_runs.refusal(measurement.loaded_config, key, text, hint)


def _operations(
    measurement: MeasuredConfig,
) -> Iterator[tuple[str, ScheduledOperation, Stage, Stage]]:
    """Yield each operation of the schedule, a repeated one several times, with its key and the stages before and
    after it."""
    entries = [
        (f"schedule[{number}]", entry)
        for number, entry in enumerate(measurement.config.schedule)
        for _ in range(entry.repeat)
    ]
    for entry, stages in zip(entries, pairwise(measurement.forecast.stages), strict=True):
        yield *entry, *stages


def _plan(measurement: MeasuredConfig, request: ShortRunRequest) -> Pilot:
    """Choose the runs that the budget allows, by the time of a few steps."""
    config, forecast = measurement.config, measurement.forecast
    steps, seeds = request.steps, request.seeds or (config.seed,)
    fewest = 2 * short_runs.FEWEST_STEPS
    if steps is None:
        short_runs.check_run_steps(measurement, fewest, "pilot")
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
    if steps < fewest:
        needed_s = (fewest * per_step + count * short_runs.START_S) / short_runs.BUDGET_USED
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
        schedule=schedule_of(config),
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
    share = (plan.horizon if case.arm == "small" else case.steps) / plan.run_steps
    schedule, longest_warmup = config.learning_rate, plan.horizon // short_runs.WARMUP
    counts: dict[str, int | None] = {
        "learning_rate.warmup_iters": min(schedule.warmup_iters, longest_warmup),
        "learning_rate.lr_decay_iters": _scaled(schedule.lr_decay_iters, share),
        "learning_rate.decay_every": _scaled(schedule.decay_every, share),
        "eval.eval_interval": max(1, case.steps // plan.evaluations),
    }
    values: dict[str, Any] = {
        **{key: value for key, value in counts.items() if value is not None},
        **short_runs.run_values(
            config, "pilot", _folder(config, plan, case), case.steps, case.seed
        ),
    }
    if options := with_steps(
        schedule.shape, schedule.options, lambda step: max(1, round(step * share))
    ):
        values["learning_rate.options"] = options
    values["schedule"] = list(_entries(measurement, plan, case, share))
    if case.arm == "small":
        values |= {"learning_rate.shape": "constant", "learning_rate.options": {}}
    last = len(measurement.forecast.stages) - 1
    model = _model(measurement, last) if case.arm == "final" else []
    return [*model, *short_runs.options(values)]


def _folder(config: RunConfig, plan: Pilot, case: PilotCase) -> Path:
    """Return the folder of a case, whose name no pilot with other settings gives to one."""
    horizons = [plan.run_steps, plan.horizon]
    parts = [settings_of(config), config.data_seed, schedule_of(config), horizons]
    key = xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True).encode())[:6]
    return Path(config.record.out_dir) / f"{config.name}-pilot-{key}-{case.name}"


def _entries(
    measurement: MeasuredConfig, plan: Pilot, case: PilotCase, share: float
) -> Iterator[dict[str, Any]]:
    """Yield the operations of a case that lasts a share of the run, of which those that grow the model are
    the case's. A pilot evaluates as often as it needs to, whatever the schedule says of evaluations."""
    grown_at = iter(case.grown_at)
    for _, entry, before, stage in _operations(measurement):
        step: int | None = None
        if stage.architecture != before.architecture:
            step = next(grown_at, None)
        elif stage.first_step is not None and entry.name not in _LEFT_OUT and not stage.skipped:
            step = round(stage.first_step * share)
        if step is None:
            continue
        options = _shortened(entry.model_extra or {}, share)
        values = entry.model_dump(include={"name", "value", "allow_inexact"}) | options
        if entry.name == "set_warmup_iters":
            values["value"] = min(entry.value, plan.horizon // short_runs.WARMUP)
        yield {**values, "when": {"at_step": step}}


def _shortened(options: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Return the options of an operation, with their numbers of steps in proportion."""
    shortened = dict(options)
    if "mask" in options:
        shortened["mask"] = _scaled(options["mask"], share)
    if isinstance(lr := options.get("lr"), Mapping):
        shortened["lr"] = {key: _scaled(steps, share) for key, steps in lr.items()}
    return shortened


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


def _check_same(file: Path, plan: Pilot, measurement: MeasuredConfig, say: Say) -> None:
    """Raise ConfigError if a pilot that is not whole is about another config; say if a whole one is."""
    config = measurement.config
    different_keys = plan.differing(config)
    if plan.schedule not in (None, schedule_of(config)):
        different_keys.append("schedule")
    if plan.run_steps != measurement.run_steps:
        different_keys.append("train.until")
    message = f"with other settings of {', '.join(different_keys)}"
    if different_keys and plan.missing:
        raise ConfigError.of(f"was begun {message}", str(file), short_runs.ANOTHER_FILE)
    if different_keys:
        say(f"{file} is complete, {message}: nothing is trained")
