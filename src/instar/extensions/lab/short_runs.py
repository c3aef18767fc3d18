"""Short runs of a config: what pilots and searches of schedules share."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instar.api.training import launch, train
from instar.checkpoint.listing import latest_intact
from instar.config.budget import Budget
from instar.config.errors import ConfigError
from instar.config.fields import LANGUAGE, values
from instar.config.load import Loaded
from instar.config.origins import PRESET
from instar.config.schema import RunConfig
from instar.distributed.failure import Interrupted
from instar.distributed.placement import placement, resolve_ranks
from instar.models.architecture import Architecture, section_of
from instar.record.events import Eval, read_events
from instar.record.rundir import RunDir
from instar.run.load_config import load_run_config
from instar.run.start.preflight import prepare_run_data
from instar.schedule.forecast import Forecast, checked_forecast
from instar.tasks.task import spec_class

FEWEST_STEPS = 20
"""Steps of the shortest run."""
BUDGET_USED = 0.85
"""Share of the budget that is planned; the rest is for what is not steps."""
START_S = 3.0
"""Seconds until a run takes its first step."""
EVALUATED = 0.15
"""Share of its time that a run may evaluate."""
_FEWEST_EVALUATIONS, _EVALUATIONS = 10, 30
"""Of each run, and within these so few that they take `EVALUATED` of its time."""
WARMUP = 4
"""The warm-up takes at most the steps divided by this: in shorter ones deep models fall behind."""

ANOTHER_FILE = "choose another file with -o, or delete this one"

Say = Callable[[str], None]


@dataclass(frozen=True)
class ShortRunRequest:
    """Which config short runs are to say something of, and what they may use."""

    config: str | None
    """the path of its file"""
    overrides: Sequence[str] = ()
    budget_s: float = math.inf
    """seconds that all may take, about"""
    steps: int | None = None
    """the horizon, steps of the longest run; None: as many as the budget allows"""
    seeds: Sequence[int] = ()
    """of the runs; empty: the config's"""
    out: Path | None = None
    """the file of what is found; None: beside the config, or in the folder of runs"""
    world_size: int | None = None
    devices: Sequence[int] | None = None
    """see `launch`"""
    say: Say = lambda _: None


@dataclass(frozen=True)
class MeasuredConfig:
    """A config that short runs are to say something of."""

    path: str | None
    overrides: tuple[str, ...]
    """With which the file gives the config without its presets."""
    loaded_config: Loaded
    forecast: Forecast
    ranks: int
    devices: Sequence[int] | None

    @property
    def config(self) -> RunConfig:
        return self.loaded_config.config

    @property
    def run_steps(self) -> int:
        """Steps of the config's run."""
        return self.forecast.steps or 1

    def load(self, settings: Sequence[str]) -> Loaded:
        """Load the config with other settings."""
        return load_run_config(self.path, [*self.overrides, *settings])

    def forecast_of(self, settings: Sequence[str]) -> Forecast:
        """Forecast the run of the config with other settings."""
        return _forecast(self.load(settings), self.ranks)

    def seconds(self, settings: Sequence[str], say: Say) -> tuple[float, float]:
        """Return how long a step and an evaluation of the config with other settings take."""
        from instar.extensions.lab.find.training import step_time

        time = step_time(self.load(settings), say)
        # ranks of one CPU share its cores
        n_parallel = 1 if time.device == "cpu" else self.ranks
        return time.step / n_parallel, time.evaluation / n_parallel


def prepare_measurement(request: ShortRunRequest) -> MeasuredConfig:
    """Load a config and prepare its data.

    Raises:
        ConfigError: its final size cannot be trained from scratch, or it has no last step.
    """
    loaded_config = load_run_config(request.config, request.overrides)
    start = resolve_ranks(
        loaded_config.config.parallel, placement(os.environ), request.world_size, request.devices
    )
    _check_kind(loaded_config)
    prepare_run_data(loaded_config, start.ranks, request.say)
    forecast = _forecast(loaded_config, start.ranks)
    if forecast.steps is None:
        raise refusal(
            loaded_config, "train.until", "has no last step, of which a short run is a share"
        )
    overrides = (*request.overrides, *_without_presets(loaded_config))
    return MeasuredConfig(
        request.config, overrides, loaded_config, forecast, start.ranks, start.devices or None
    )


def refusal(loaded_config: Loaded, key: str, message: str, hint: str = "") -> ConfigError:
    """Return an error at a key of a config."""
    return ConfigError(loaded_config.problem(key, f"{key} {message}", hint))


def options(values: Mapping[str, Any]) -> list[str]:
    """Return values of dotted keys as texts for `--set`."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def shape_of_stage(measurement: MeasuredConfig, stage: int) -> Architecture:
    """Return the shape of a stage as a new model has it.

    Raises:
        ConfigError: no config has this shape.
    """
    begin, end = (measurement.forecast.stages[n].architecture for n in (0, stage))
    assert isinstance(begin, Architecture)
    assert isinstance(end, Architecture)
    if end.lora or end.mask or end.windows:
        text = "ends with adapters, a mask or windows"
        raise refusal(measurement.loaded_config, "schedule", text)
    # widening and longer contexts adjust these of a trained model, not of a new one
    return end.changed(norm_eps=begin.norm_eps, rope_base=begin.rope_base)


def shape_settings(before: Architecture, after: Architecture) -> dict[str, Any]:
    """Return the keys of `model` with which a config of one shape has another, with their values."""
    old, new = (section_of(shape).model_dump() for shape in (before, after))
    return {f"model.{key}": value for key, value in new.items() if old[key] != value}


def check_begun(file: Path, request: ShortRunRequest, steps: int, seeds: Sequence[int]) -> None:
    """Raise ConfigError if a request asks for other steps or seeds than those with which a file was begun."""
    is_other_seed = bool(request.seeds) and {*request.seeds} != {*seeds}
    if is_other_seed or request.steps not in (None, steps):
        seed_options = " ".join(f"--seed {seed}" for seed in dict.fromkeys(seeds))
        message = f"was begun with --steps {steps} {seed_options}"
        raise ConfigError.of(message, str(file), ANOTHER_FILE)


def evaluations(steps: int, step_s: float, evaluation_s: float) -> int:
    """Return how many evaluations a run of so many steps can afford."""
    affordable = EVALUATED * steps * step_s / max(evaluation_s, 1e-6)
    return max(_FEWEST_EVALUATIONS, min(_EVALUATIONS, int(affordable)))


def check_run_steps(measurement: MeasuredConfig, fewest: int, kind: str) -> None:
    """Raise ConfigError if a config's run is too short for runs that are shorter still, whatever the budget."""
    if measurement.run_steps < fewest:
        message = f"ends the run after {measurement.run_steps:,} steps, and a {kind} needs {fewest}"
        hint = f"make it longer, or give --steps {fewest}"
        raise refusal(measurement.loaded_config, "train.until", message, hint)


def too_short(what: str, budget_s: float, needed_s: float) -> ConfigError:
    """Return the error of a budget that is too small."""
    hint = f"give at least {Budget('seconds', max(1.0, round(needed_s)))}"
    return ConfigError.of(f"{what} do not fit in {budget_s:,.0f} s", "--budget", hint)


def run_values(config: RunConfig, kind: str, folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """Return what all short runs set: the name `<name>-<kind>`, their folder, their end, and no work beside
    training."""
    return {
        "name": f"{config.name}-{kind}",
        "record.run_dir": os.fspath(folder),
        "resume": "auto",
        "seed": seed,
        "data.seed": config.data_seed,
        "train.until": [f"{steps}it"],
        "eval.eval_epochs": None,
        "early_stopping.rules": [],
        "test.at_end": False,
        "record.report": False,
        "record.sample_tokens": 0,
        "record.sample_every": None,
    }


def train_or_resume(
    measurement: MeasuredConfig, path: str | None, overrides: Sequence[str], kind: str
) -> Path:
    """Train a run, or go on with it, and return its folder.

    Raises:
        RunFailed, Interrupted: see `launch`.
    """
    try:
        if measurement.ranks == 1 and measurement.devices is None:
            return train(path, overrides, curves=False)
        return launch(
            path,
            overrides,
            world_size=measurement.ranks,
            devices=measurement.devices,
            curves=False,
        )
    except Interrupted:
        raise Interrupted(f"the {kind} was interrupted; the same command goes on with it") from None


def loss_at_end(run: Path, steps: int) -> float | None:
    """Return the held-out loss of a run's last step; None unless the run has got so far, or if the loss is
    not finite."""
    manifest = latest_intact(run, check=False)[0].manifest
    if manifest.step != steps or manifest.loss is None or not math.isfinite(manifest.loss):
        return None
    return manifest.loss


def losses_of(run: Path) -> tuple[tuple[int, float, float], ...]:
    """Return steps, tokens and held-out losses of a run's evaluations."""
    losses = {
        event.step: (event.step, float(event.tokens), event.loss)
        for event in read_events(RunDir(run).events)
        if isinstance(event, Eval) and event.split == "val" and math.isfinite(event.loss)
    }
    return tuple(losses[step] for step in sorted(losses))


def _without_presets(loaded_config: Loaded) -> list[str]:
    """Return settings with which the same file gives the same config without its presets, of which one
    may make the schedule that short runs change."""
    every, origins = values(loaded_config.config), loaded_config.origins
    preset_values = {key: every[key] for key in every if origins[key].startswith(PRESET)}
    return options(preset_values) + (["preset=[]"] if preset_values else [])


def _check_kind(loaded_config: Loaded) -> None:
    """Raise ConfigError for configs whose final size cannot be trained from scratch."""
    config = loaded_config.config
    if config.task != LANGUAGE:
        raise refusal(loaded_config, "task", f"{config.task}: only {LANGUAGE} models are measured")
    if config.starts_from is not None:
        message = "has weights that the final size does not have"
        raise refusal(loaded_config, "model.from", message, "leave it out")


def _forecast(loaded_config: Loaded, ranks: int) -> Forecast:
    return checked_forecast(
        loaded_config, spec_class(loaded_config.config.task).open(loaded_config, ranks), ranks
    )
