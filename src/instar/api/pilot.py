"""Pilots: short runs of a config, from which the saving of its schedule of growth is predicted."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from instar.config.errors import ConfigError
from instar.schedule.pilot import (
    Pilot,
    PilotCase,
    PilotModel,
    PilotRun,
    beside,
    read_pilot,
    settings_of,
    write_pilot,
)

if TYPE_CHECKING:
    from instar.config.load import Loaded
    from instar.config.schema import RunConfig
    from instar.schedule.forecast import Forecast
    from instar.schedule.saving import ExpectedSaving

FEWEST_STEPS = 20
"""Steps of the shortest run."""
_SMALL = 1.25
"""Steps of the size that the schedule begins with, relative to the longest of the final size."""
_BUDGET_USED = 0.85
"""Share of the budget that is planned; the rest is for what is not steps."""
_START_S = 3.0
"""Seconds until a run takes its first step."""
_FEWEST_EVALUATIONS, _EVALUATIONS = 10, 30
"""Of each run, and within these so few that they take `_EVALUATED` of its time."""
_EVALUATED = 0.15
_WARMUP = 4
"""The warm-up takes at most the horizon divided by this: in shorter ones deep models fall behind."""
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


@dataclass(frozen=True)
class _Question:
    """What a pilot is about: a config with a schedule of growth."""

    path: str | None
    overrides: tuple[str, ...]
    loaded: Loaded
    forecast: Forecast
    ranks: int
    devices: Sequence[int] | None

    @property
    def config(self) -> RunConfig:
        return self.loaded.config


def pilot(
    config: str | os.PathLike[str] | None,
    overrides: Sequence[str] = (),
    *,
    budget_s: float = math.inf,
    steps: int | None = None,
    seeds: Sequence[int] = (),
    out: Path | None = None,
    world_size: int | None = None,
    devices: Sequence[int] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> PilotResult:
    """Run what is missing of a pilot, and write its file after each run.

    The runs are ordinary ones, `<name>-pilot-…` in the config's folder of runs: the final size from
    scratch, half as long and as long as the pilot's horizon; the config's own run with its schedule,
    shortened to this horizon; and its first size without growth, a little longer, at a stable rate.
    Decay, moments of growth and evaluations are shortened in proportion. A pilot that was interrupted
    goes on.

    Args:
        budget_s: seconds that it may take, about.
        steps: of the longest runs, the horizon; default: as many as the budget allows. It is chosen at
            the first call.
        seeds: of the runs; default: the config's.
        out: the pilot's file; default: beside the config, or in the folder of runs.
        world_size, devices: see `launch`.

    Raises:
        ConfigError: the config has no schedule of growth, or is of a kind that pilots do not know;
            the budget is too small; the file is another pilot's.
        RunFailed, Interrupted: see `launch`; the same call goes on.
    """
    from instar.schedule.expected import expected
    from instar.schedule.saving import ExpectedSaving, summary

    begun = time.monotonic()
    path = None if config is None else os.fspath(config)
    asked = _ask(path, overrides, world_size, devices, say)
    file = out or pilot_file(path, asked.config)
    known = read_pilot(file) if file.exists() else None
    if known is None:
        found = _plan(asked, budget_s, steps, seeds or (asked.config.seed,), say)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_pilot(file, found)
    else:
        found = known
        _check_same(file, found, asked)
    slowest = 0.0
    for number, case in enumerate(found.missing):
        spent = time.monotonic() - begun
        if number >= MUST and spent + slowest > budget_s:
            say(f"the budget is used up: {len(found.missing)} runs are left for the next call")
            break
        say(f"pilot: {case.name}, run {len(found.runs) + 1} of {len(found.cases)}")
        done = _run(asked, found, case)
        slowest = max(slowest, time.monotonic() - begun - spent)
        found = structs.replace(found, runs=(*found.runs, done))
        found = structs.replace(found, found=summary(found))
        write_pilot(file, found)
    saving = expected(asked.forecast, asked.config, path, file)
    if not isinstance(saving, ExpectedSaving):
        raise ConfigError.one("has no runs to predict from", str(file))
    return PilotResult(found, saving, file)


def pilot_file(path: str | None, config: RunConfig) -> Path:
    """Return where a pilot's file is if nobody says where: beside the config, or among the runs."""
    return beside(Path(config.record.out_dir) / config.name if path is None else path)


def _ask(
    path: str | None,
    overrides: Sequence[str],
    world_size: int | None,
    devices: Sequence[int] | None,
    say: Callable[[str], None],
) -> _Question:
    from instar.distributed.placement import placement, resolve_ranks
    from instar.run.lifecycle.load import load_config
    from instar.run.lifecycle.preflight import prepare_data

    loaded = load_config(path, overrides)
    start = resolve_ranks(loaded.config.parallel, placement(os.environ), world_size, devices)
    _check_kind(loaded)
    prepare_data(loaded, start.ranks, say)
    forecast = _forecast(loaded, start.ranks)
    if forecast.steps is None:
        raise _refused(loaded, "train.until", "has no last step, of which a pilot could be a share")
    if len({stage.architecture for stage in forecast.stages}) < 2:
        raise _refused(
            loaded, "schedule", "grows no model", "add an operation such as stack_layers"
        )
    given = (*overrides, *_without_presets(loaded))
    return _Question(path, given, loaded, forecast, start.ranks, start.devices or None)


def _without_presets(loaded: Loaded) -> list[str]:
    """Return settings with which the same file gives the same config without its presets, of which one
    may make the schedule that cases change."""
    from instar.config.fields import values
    from instar.config.load import PRESET

    every, origins = values(loaded.config), loaded.origins
    made = [key for key in every if origins[key].startswith(PRESET)]
    return [f"{key}={json.dumps(every[key])}" for key in made] + (["preset=[]"] if made else [])


def _refused(loaded: Loaded, key: str, message: str, hint: str = "") -> ConfigError:
    """Return an error at a key of a config."""
    return ConfigError(loaded.problem(key, f"{key} {message}", hint))


def _check_kind(loaded: Loaded) -> None:
    """Raise ConfigError for configs whose final size cannot be trained from scratch."""
    from instar.config.fields import LANGUAGE

    config = loaded.config
    if config.task != LANGUAGE:
        raise _refused(loaded, "task", f"{config.task}: pilots are for {LANGUAGE} models")
    if config.starts_from is not None:
        raise _refused(
            loaded, "model.from", "has weights that the final size does not have", "leave it out"
        )
    for number, entry in enumerate(config.schedule):
        if entry.name == "set_context" or "lora" in entry.name:
            raise _refused(
                loaded,
                f"schedule[{number}]",
                f"{entry.name} is not known to pilots",
                "leave it out",
            )


def _forecast(loaded: Loaded, ranks: int) -> Forecast:
    from instar.schedule.forecast import checked_forecast
    from instar.tasks.task import spec_class

    return checked_forecast(loaded, spec_class(loaded.config.task).open(loaded, ranks), ranks)


def _plan(
    asked: _Question,
    budget_s: float,
    steps: int | None,
    seeds: Sequence[int],
    say: Callable[[str], None],
) -> Pilot:
    """Choose the runs that the budget allows, by the time of a few steps."""
    from instar.config.budget import Budget
    from instar.growth.operators import is_growth
    from instar.run.find.step_time import step_time

    config, forecast = asked.config, asked.forecast
    first, last = forecast.stages[0], forecast.stages[-1]
    run_steps = forecast.steps or 1
    times = [
        step_time(_loaded(asked, [*_final_model(asked, i), "schedule=[]"]), say)
        for i in (0, len(forecast.stages) - 1)
    ]
    # ranks of one CPU share its cores
    several = asked.ranks if config.device.startswith("cuda") else 1
    small, final = (
        PilotModel(stage.parameters.total, stage.flops_per_token, each.step / several)
        for stage, each in zip((first, last), times, strict=True)
    )
    shares = _moments(forecast)
    longer = _SMALL if config.learning_rate.shape in ("wsd", "constant") else 0.0
    ratio = min(1.0, small.seconds_per_step / final.seconds_per_step)
    costs = [1.0, 0.5, 1 - shares[-1] * (1 - ratio), longer * ratio]
    count = len(seeds) * len(costs)
    seconds = _BUDGET_USED * budget_s - count * _START_S
    per_step = len(seeds) * sum(costs) * final.seconds_per_step * (1 + _EVALUATED)
    if steps is None:
        steps = int(min(run_steps, seconds / per_step))
    if steps < 2 * FEWEST_STEPS:
        needed = (2 * FEWEST_STEPS * per_step + count * _START_S) / _BUDGET_USED
        raise ConfigError.one(
            f"{count} runs of at least {FEWEST_STEPS} steps do not fit in {budget_s:,.0f} s",
            where="--budget",
            hint=f"give at least {Budget('seconds', max(1.0, round(needed)))}",
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
        run_steps=run_steps,
        stable_share=_stable_share(config),
        tokens_per_step=float(first.settings.global_batch * first.weight),
        small=small,
        final=final,
        cases=tuple(cases),
        evaluations=_evaluations(steps, final.seconds_per_step, times[1].evaluation / several),
    )


def _evaluations(steps: int, step_s: float, evaluation_s: float) -> int:
    affordable = _EVALUATED * steps * step_s / max(evaluation_s, 1e-6)
    return max(_FEWEST_EVALUATIONS, min(_EVALUATIONS, int(affordable)))


def _moments(forecast: Forecast) -> list[float]:
    """Return the shares of the run after which the model grows; those that depend on a loss, which
    nobody knows yet, evenly between the others."""
    run_steps = forecast.steps or 1
    grown = [
        after
        for before, after in zip(forecast.stages, forecast.stages[1:], strict=False)
        if before.architecture != after.architecture
    ]
    known = {
        number: stage.first_step / run_steps
        for number, stage in enumerate(grown)
        if stage.first_step is not None and stage.first_step == stage.latest_step
    }
    shares: list[float] = []
    for number in range(len(grown)):
        before = shares[-1] if shares else 0.0
        after = next((known[n] for n in range(number, len(grown)) if n in known), None)
        if number in known:
            shares.append(known[number])
        elif after is not None:
            shares.append((before + after) / 2)
        else:
            shares.append(before + (0.8 - before) * (number + 1) / len(grown))
    return shares


def _stable_share(config: RunConfig) -> float:
    schedule = config.learning_rate
    if schedule.shape == "wsd":
        return 1 - schedule.decay_fraction
    return _MOSTLY if schedule.has_end else 1.0


def _final_model(asked: _Question, stage: int) -> list[str]:
    """Return settings of a run that begins with the shape of a stage.

    Raises:
        ConfigError: no config has this shape.
    """
    from instar.models.architecture import Architecture, section_of

    begin, end = (asked.forecast.stages[n].architecture for n in (0, stage))
    if stage == 0:
        return []
    assert isinstance(begin, Architecture)
    assert isinstance(end, Architecture)
    if end.lora or end.mask:
        raise _refused(asked.loaded, "schedule", "ends with adapters or a mask")
    # widening and longer contexts adjust these of a trained model, not of a new one
    end = end.changed(norm_eps=begin.norm_eps, rope_base=begin.rope_base)
    before, after = (section_of(one).model_dump() for one in (begin, end))
    return [
        f"model.{key}={json.dumps(value)}" for key, value in after.items() if before[key] != value
    ]


def _loaded(asked: _Question, settings: Sequence[str]) -> Loaded:
    from instar.run.lifecycle.load import load_config

    return load_config(asked.path, [*asked.overrides, *settings])


def _settings(asked: _Question, found: Pilot, case: PilotCase) -> list[str]:
    """Return the settings of a case, beside those of the config."""
    from instar.config.sections import ScheduledOperation
    from instar.schedule.branches import BRANCH

    config = asked.config
    horizon = max(each.steps for each in found.cases if each.arm == "final")
    share = (horizon if case.arm == "small" else case.steps) / found.run_steps
    schedule = config.learning_rate
    counts: dict[str, int | None] = {
        "learning_rate.warmup_iters": min(schedule.warmup_iters, horizon // _WARMUP),
        "learning_rate.lr_decay_iters": _scaled(schedule.lr_decay_iters, share),
        "learning_rate.decay_every": _scaled(schedule.decay_every, share),
        "eval.eval_interval": max(1, case.steps // found.evaluations),
    }
    run = f"{config.name}-pilot-{case.name}"
    values: dict[str, Any] = {
        **{key: value for key, value in counts.items() if value is not None},
        "name": f"{config.name}-pilot",
        "record.run_dir": os.fspath(Path(config.record.out_dir) / run),
        "resume": "auto",
        "seed": case.seed,
        "data.seed": config.data_seed,
        "train.until": [f"{case.steps}it"],
        "eval.eval_epochs": None,
        "early_stopping.rules": [],
        "test.at_end": False,
        "record.report": False,
        "record.sample_tokens": 0,
        "record.sample_every": None,
    }
    entries: list[dict[str, Any]] = []
    grown_at = list(case.grown_at)
    stages = asked.forecast.stages
    for before, stage, entry in zip(stages, stages[1:], config.schedule, strict=False):
        given = entry.model_dump(exclude={*ScheduledOperation.model_fields} - {"name", "value"})
        if entry.name == BRANCH:
            continue
        if stage.architecture == before.architecture:
            step = round((stage.first_step or found.run_steps) * share)
        elif grown_at:
            step = grown_at.pop(0)
        else:
            continue
        entries.append({**given, "when": {"at_step": step}})
    values["schedule"] = entries
    if case.arm == "small":
        values["learning_rate.shape"] = "constant"
    model = _final_model(asked, len(asked.forecast.stages) - 1) if case.arm == "final" else []
    return [*model, *(f"{key}={json.dumps(value)}" for key, value in values.items())]


def _scaled(iters: int | None, share: float) -> int | None:
    return None if iters is None else max(1, round(iters * share))


def _run(asked: _Question, found: Pilot, case: PilotCase) -> PilotRun:
    """Train a case, or go on with it, and read how it ended."""
    from instar.api.training import launch, train
    from instar.checkpoint.listing import latest_intact
    from instar.distributed.failure import Interrupted, RunFailed
    from instar.record.events import Eval, read_events
    from instar.record.rundir import RunDir
    from instar.schedule.saving import spending

    settings = _settings(asked, found, case)
    given = [*asked.overrides, *settings]
    try:
        if asked.ranks == 1 and asked.devices is None:
            path = train(asked.path, given)
        else:
            path = launch(asked.path, given, world_size=asked.ranks, devices=asked.devices)
    except Interrupted:
        raise Interrupted("the pilot was interrupted; the same command goes on with it") from None
    manifest = latest_intact(path, check=False)[0].manifest
    if manifest.loss is None or not math.isfinite(manifest.loss) or manifest.step != case.steps:
        raise RunFailed(
            f"{path}: ended at step {manifest.step:,} with loss {manifest.loss}, so nothing can be "
            "predicted from it; delete it to try again"
        )
    evaluations = {
        event.step: (event.step, float(event.tokens), event.loss)
        for event in read_events(RunDir(path).events)
        if isinstance(event, Eval) and event.split == "val" and math.isfinite(event.loss)
    }
    return PilotRun(
        case,
        manifest.loss,
        spending(_forecast(_loaded(asked, settings), asked.ranks)),
        tuple(evaluations[step] for step in sorted(evaluations)),
    )


def _check_same(file: Path, found: Pilot, asked: _Question) -> None:
    """Raise ConfigError if a pilot that is not whole is about another config."""
    others = found.differing(asked.config)
    if others and found.missing:
        raise ConfigError.one(
            f"was begun with other settings of {', '.join(others)}",
            str(file),
            "choose another file with -o, or delete this one",
        )
