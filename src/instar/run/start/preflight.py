"""Preflight checks of a run, before anything is started or created.

Keys that the config leaves open are derived from the data and written into it, so that a run is
determined by its config and its history alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from instar.config.budget import parse_budget
from instar.config.checks import rank_checks
from instar.config.errors import ConfigError, ConfigProblem
from instar.config.load import Loaded
from instar.config.schema import MUONS, OptimizerConfig, RunConfig
from instar.config.torch_optim.optimizers import unread_keys
from instar.config.torch_optim.schedulers import CYCLES_MOMENTUM
from instar.extensions import active_extensions, load_target
from instar.models.shape import Growable
from instar.record.format import bytes_text
from instar.record.rundir import check_run_dir
from instar.record.start_folder import explain_error
from instar.record.system import host_bytes
from instar.record.trackers.tracker import missing_libraries
from instar.schedule.branches import BRANCH, branch_folder, read_branch
from instar.schedule.branches import branch_problems as schedule_problems
from instar.schedule.checks import has_end, remarks
from instar.schedule.forecast import Forecast, checked_forecast, decay_end
from instar.schedule.memory import FORECAST_SHARE, in_force
from instar.schedule.settings import CONTEXT, Settings, initial_settings
from instar.schedule.triggers import evaluates_at_start, operation
from instar.tasks.task import Say, TaskSpec, spec_class


@dataclass(frozen=True)
class Prepared:
    """A checked run, ready to start."""

    config: RunConfig
    """config without open keys"""
    spec: TaskSpec
    forecast: Forecast
    derived_values: Mapping[str, object]
    """derived values by dotted key"""
    notes: tuple[str, ...] = ()
    """how the config was read"""

    @property
    def warnings(self) -> list[str]:
        """What the run does other than its config or the task's code suggests."""
        config, texts = self.config, [*self.notes, *self.spec.warnings]
        schedule, until = config.learning_rate, ", ".join(config.train.until)
        if schedule.has_end and schedule.lr_decay_iters is None:
            texts.append(
                f"learning_rate.shape {schedule.shape} does not decay, because {until} has no last "
                "step; set learning_rate.lr_decay_iters to the step at which the decay is to end"
            )
        changes = [operation.name for operation in config.schedule if operation.name in CONTEXT]
        if changes and config.eval.context is None:
            texts.append(
                f"{changes[0]} changes held-out samples too: losses before and after it cannot be "
                "compared; eval.context sets one length for all evaluations"
            )
        if schedule.shape in CYCLES_MOMENTUM:
            texts.append(
                f"learning_rate.shape {schedule.shape} changes the rate alone: momentum stays, as with torch's "
                "cycle_momentum=False"
            )
        settings, fields = config.optimizer.model_dump(), OptimizerConfig.model_fields
        keys_without_effect = unread_keys(settings, {key: fields[key].default for key in MUONS})
        texts += [
            f"optimizer.{key} has no effect on {settings['name']}" for key in keys_without_effect
        ]
        if not config.schedule:  # whose branches may have another shape
            texts += [
                f"learning_rate.{key} has no effect on the shape {schedule.shape}"
                for key in schedule.unread
            ]
        return [*texts, *remarks(config), *self._short_run()]

    def _short_run(self) -> Iterator[str]:
        """Yield what does not happen because the run, or its data, are short."""
        config, forecast = self.config, self.forecast
        warmup, steps = config.learning_rate.warmup_iters, forecast.steps
        has_changes = any(
            name in operation.name
            for operation in config.schedule
            for name in ("warmup", "reset_lr")
        )
        if steps is not None and warmup > steps and not has_changes:
            yield (
                f"learning_rate.warmup_iters ({warmup:,}) is more than the {steps:,} steps of the run: the rate "
                f"rises to {steps / warmup:.0%} of optimizer.lr"
            )
        total = config.learning_rate.options.get("total_steps")
        if steps is not None and total is not None and steps > total + warmup and not has_changes:
            yield (
                f"learning_rate.options.total_steps ({total:,}) ends before the {steps:,} steps of the run: the rate stays "
                "at its last"
            )
        for number, stage in enumerate(forecast.stages):
            if stage.is_idle:
                yield f"schedule[{number - 1}] {stage.operation} changes nothing: it is so already"
        for stage in forecast.stages:
            samples, batch = forecast.samples_per_epoch, stage.settings.global_batch
            if samples is not None and samples < batch:
                yield (
                    f"the training data have {samples:,} samples, fewer than the {batch:,} of a step: every step "
                    "is an epoch of its own, and trains on no more than these"
                )
                return


def prepare_run_data(loaded_config: Loaded, world_size: int, say: Callable[[str], None]) -> None:
    """Prepare the data set unless it exists. One process calls this for all ranks.

    Raises:
        ConfigError: it cannot be prepared, or exists and contradicts the config.
    """
    config = loaded_config.config
    _check_place(loaded_config, world_size)
    with _explained(loaded_config):
        spec_class(config.task).prepare(loaded_config, world_size, say)


@contextmanager
def _explained(loaded_config: Loaded) -> Iterator[None]:
    """Say of paths that lead nowhere in which folder they would lead somewhere."""
    try:
        yield
    except ConfigError as error:
        raise explain_error(loaded_config, error) from error


def preflight(
    loaded_config: Loaded,
    world_size: int,
    *,
    new: bool = True,
    assume: Say | None = None,
    settings: Settings | None = None,
    device: str | None = None,
) -> Prepared:
    """Check a config against the data, the machine and the number of ranks.

    Imports no torch and initialises no device.

    Args:
        new: the run gets a new folder; False: it is resumed.
        assume: called with what a run would prepare and what is assumed of it, if the data set does
            not exist; None: it must exist (`prepare_data`).
        settings: those with which a resumed run goes on; None: those of the config.
        device: kind of the ranks' devices, for the forecast of memory; None: the config's `device`.

    Raises:
        ConfigError: lists all mistakes.
    """
    config = loaded_config.config
    problems: list[ConfigProblem] = []
    if new:
        with _collecting(problems):
            check_run_dir(config.record, config.name)
        problems += _branches(loaded_config)
    spec: TaskSpec | None = None
    assumptions: list[str] = []
    with _collecting(problems):
        spec = _open_spec(loaded_config, world_size, assume, assumptions)
    if spec is None:
        raise ConfigError(*problems)
    if config.test.at_end and not assumptions:
        with _collecting(problems):
            spec.held_out("test", config.eval.context or config.context)
    problems += _batch_problems(loaded_config, spec, world_size, settings)
    with _collecting(problems):
        _check_place(loaded_config, world_size)
    if new:  # a resumed model may have grown
        problems += sharding_problems(loaded_config, spec, spec.architecture, world_size)
        problems += _single_rank_problems(loaded_config, world_size)
    if not assumptions and spec.samples(config.context) is None:
        problems += _epochs(loaded_config)
    if problems:
        raise ConfigError(*problems)
    if not new:  # the schedule's progress is in the history, and is checked when the run is resumed
        without = config.model_copy(update={"schedule": ()})
        loaded_config = dataclasses.replace(loaded_config, config=without)
    forecast = checked_forecast(_on_device(loaded_config, device), spec, world_size)
    if not assumptions:
        _check_last_step(loaded_config, forecast)
    return dataclasses.replace(_resolve(config, spec, forecast), notes=loaded_config.notes)


def _single_rank_problems(loaded_config: Loaded, world_size: int) -> Iterator[ConfigProblem]:
    """Yield why a model cannot be divided among the ranks, where there is only one."""
    strategy = loaded_config.config.parallel.strategy
    if world_size == 1 and strategy in ("fsdp", "hsdp"):
        yield loaded_config.problem(
            "parallel.strategy",
            f"parallel.strategy {strategy} divides the model among ranks, and there is one",
            "start more ranks with --nproc, or use strategy: ddp or auto",
        )


def _on_device(loaded_config: Loaded, device: str | None) -> Loaded:
    """Return the config for a kind of device. The run keeps its own: a resume may have others than `auto` had."""
    if device is None:
        return loaded_config
    config = loaded_config.config.model_copy(update={"device": device})
    return dataclasses.replace(loaded_config, config=config)


def _open_spec(
    loaded_config: Loaded, world_size: int, assume: Say | None, assumptions: list[str]
) -> TaskSpec:
    """Open the task's data; without them, with `assume`, add what is assumed of them to `assumptions`."""
    if assume is None:
        return spec_class(loaded_config.config.task).open(loaded_config, world_size)
    with _explained(loaded_config):
        spec = spec_class(loaded_config.config.task).assume(
            loaded_config, assumptions.append, world_size
        )
    for assumption in assumptions:
        assume(assumption)
    return spec


def _batch_problems(
    loaded_config: Loaded, spec: TaskSpec, world_size: int, settings: Settings | None
) -> Iterator[ConfigProblem]:
    """Yield why a global batch has too few samples for the ranks, or too many for the data."""
    config = loaded_config.config
    settings = settings or initial_settings(config)
    global_batch = settings.global_batch
    if global_batch < world_size:
        yield loaded_config.problem(
            "train.batch_size",
            f"a global batch of {global_batch} samples leaves some of {world_size} ranks "
            "without any at every step",
            f"make batch_size × gradient_accumulation_steps at least {world_size}",
        )
    samples = spec.samples(settings.context)
    if config.data.drop_last and samples is not None and samples < global_batch:
        yield loaded_config.problem(
            "data.drop_last",
            f"data.drop_last leaves out every sample: an epoch has {samples:,} samples, fewer than a global batch "
            f"of {global_batch:,}",
            "lower train.batch_size or gradient_accumulation_steps",
        )


def _check_last_step(loaded_config: Loaded, forecast: Forecast) -> None:
    """Raise ConfigError if the learning rate's schedule needs the run's last step, and it is unknown."""
    schedule = loaded_config.config.learning_rate
    is_needed = (
        schedule.lr_decay_iters is None and schedule.has_end and has_end(loaded_config.config)
    )
    if forecast.steps is None and is_needed:
        raise ConfigError(
            loaded_config.problem(
                "learning_rate.lr_decay_iters",
                f"learning_rate.lr_decay_iters is needed: a {schedule.shape} schedule needs its last "
                "step, and the number of samples of this source is unknown",
                "set it, or a budget such as 2000it",
            )
        )


def foreseen_precision(prepared_run: Prepared) -> str:
    """Return the precision of a run on this machine, and why, as far as it is known without torch."""
    config = prepared_run.config
    if config.precision != "auto":
        return config.precision
    on_gpu = prepared_run.spec.fp32_reason("cuda")
    reason = on_gpu if config.device.startswith("cuda") else prepared_run.spec.fp32_reason("cpu")
    if reason:
        only_here = config.device == "auto" and not on_gpu
        return f"fp32{' on a CPU' if only_here else ''}: {reason}"
    return "bf16, if the run measures at its start that the device is faster in it"


MAX_ERROR_FACTOR = 10
"""Upper bound on the error factor of the forecast of activation memory."""


def check_memory(
    loaded_config: Loaded,
    forecast: Forecast,
    device: str,
    device_bytes: int | None = None,
    ranks_here: int = 1,
) -> None:
    """Check that the model fits in memory, before it is built.

    Args:
        device: `auto` if not known yet; then only the weights are checked, which are built in host
            memory.
        device_bytes: memory of a GPU; None: unknown.
        ranks_here: number of ranks that share the memory of this machine.

    Raises:
        ConfigError: it does not fit; states the required and the available memory.
    """
    config, first = loaded_config.config, forecast.stages[0]
    first_need = first.memory[in_force(config, forecast.world_size)]
    if config.parallel.strategy == "auto":  # which is resolved when the devices are known
        first_need = min(first.memory.values(), key=lambda memory: memory.kept_bytes)
    memory, parameter_bytes = host_bytes() // ranks_here, first_need.kept_bytes
    machine = "the machine" if ranks_here == 1 else f"the machine, for each of {ranks_here} ranks,"
    what = "for weights, gradients and optimizer"
    bounds = [(first_need.step.get("weights", 0), memory, "for its weights", machine)]
    limit, place = (memory, machine) if device == "cpu" else (device_bytes, "the GPU")
    total = sum(first_need.step.values())
    if config.parallel.fsdp.offload:
        if device == "cpu":
            raise ConfigError(
                loaded_config.problem(
                    "parallel.fsdp.offload",
                    "parallel.fsdp.offload needs GPUs, and there is none: all is in host memory already",
                    "leave it out",
                )
            )
        bounds.append((parameter_bytes, memory, f"{what}, which are offloaded", machine))
        total, parameter_bytes = total - parameter_bytes, 0
    if limit is not None:
        bounds.append((parameter_bytes, limit, what, place))
        bounds.append(
            (total // MAX_ERROR_FACTOR, limit, f"in a step ({bytes_text(total)} in all)", place)
        )
    for size, available, what, where in bounds:
        if size > available:
            raise ConfigError(
                loaded_config.problem(
                    "model",
                    f"the model of {first.parameters.total:,} parameters needs "
                    f"{bytes_text(size)} {what}, and {where} has {bytes_text(available)}",
                    suggestion(loaded_config, forecast, available)
                    or "make the model or the micro-batch smaller",
                )
            )


def suggestion(loaded_config: Loaded, forecast: Forecast, available: int) -> str:
    """Return what to set where a run does not fit on its devices; "" if it fits or nothing helps.

    Args:
        available: memory of the device of a rank, in bytes.
    """
    config, ranks, limit = loaded_config.config, forecast.world_size, FORECAST_SHARE * available
    strategy = in_force(config, ranks)
    peak = forecast.peak_bytes(strategy)
    if peak <= limit or ranks == 1:
        return ""
    bytes_by_setting = {"strategy: fsdp": forecast.peak_bytes("fsdp")}
    if strategy in ("fsdp", "hsdp") and config.reproducible == "fixed":
        stages = [stage.memory[strategy] for stage in forecast.stages]
        peaks = (max(sum(m.step.values()) - m.accumulated_bytes, m.growth) for m in stages)
        bytes_by_setting["fsdp.reduce_each_micro_batch: true"] = max(peaks)
    for setting, needed_bytes in bytes_by_setting.items():
        if needed_bytes < min(peak, limit):
            sizes = f"{bytes_text(needed_bytes)} of {bytes_text(available)}"
            return f"{setting} over {ranks} ranks needs {sizes}"
    return ""


def _resolve(config: RunConfig, spec: TaskSpec, forecast: Forecast) -> Prepared:
    derived_values = {**spec.derived, "eval.at_start": evaluates_at_start(config)}
    derived_values["data.seed"] = config.seed
    if (end := decay_end(config, forecast.steps)) is not None:
        derived_values["learning_rate.lr_decay_iters"] = end
    derived_values = {
        key: value for key, value in derived_values.items() if _value(config, key) is None
    }
    return Prepared(_with(config, derived_values), spec, forecast, derived_values)


def sharding_problems(
    loaded_config: Loaded, spec: TaskSpec, architecture: Growable, world_size: int
) -> Iterator[ConfigProblem]:
    """Yield why the model cannot be divided among the ranks that are to share it."""
    strategy, shards = (
        loaded_config.config.parallel.strategy,
        loaded_config.config.parallel.shards_of(world_size),
    )
    if shards == 1:
        return
    if reason := spec.refuses_shards:
        yield loaded_config.problem(
            "parallel.strategy",
            f"the task {loaded_config.config.task} refuses parallel.strategy {strategy}: {reason}",
            "use strategy: ddp",
        )
    table = architecture.parameters()
    sizes = {name: math.prod(entry.shape) for name, entry in table.items()}
    scalars = [name for name, entry in table.items() if not entry.shape]
    short = [name for name, entry in table.items() if entry.shape and entry.shape[0] < shards]
    if scalars:
        yield loaded_config.problem(
            "parallel.strategy",
            f"{scalars[0]} is a single number, which cannot be divided among {shards} ranks",
            "make it a vector of one element, or use strategy: ddp",
        )
    if 2 * sum(sizes[name] for name in short) > sum(sizes.values()):
        name = max(short, key=sizes.__getitem__)
        yield loaded_config.problem(
            "parallel.strategy",
            f"most of the model cannot be divided among {shards} ranks, each of which holds some rows "
            f"of every parameter: {name} has {table[name].shape[0]} rows",
            "use fewer ranks, hsdp with fewer shards, or ddp",
        )


def _branches(loaded_config: Loaded) -> Iterator[ConfigProblem]:
    """Yield branches whose folders exist beside the one that the new run is given."""
    if loaded_config.config.record.run_dir is None:
        return
    for number, operation_config in enumerate(loaded_config.config.schedule):
        if operation_config.name != BRANCH or any(schedule_problems(operation(operation_config))):
            continue
        folder = branch_folder(
            Path(loaded_config.config.record.run_dir), read_branch(operation(operation_config)).name
        )
        if folder.exists():
            yield loaded_config.problem(
                f"schedule[{number}].value",
                f"schedule[{number}]: the branch's folder {folder} exists already",
                "choose another name, or another record.run_dir",
            )


def _epochs(loaded_config: Loaded) -> list[ConfigProblem]:
    """Return a problem if epochs are to be counted across streams of unknown length."""
    config = loaded_config.config
    counts_epochs = any(parse_budget(text).kind == "epochs" for text in config.train.until)
    changes = [operation.name for operation in config.schedule if operation.name in CONTEXT]
    if not (counts_epochs and changes):
        return []
    return [
        loaded_config.problem(
            "train.until",
            f"{changes[0]} restarts the stream, and the completed fraction of an epoch is unknown "
            "until its end has been reached once",
            "give train.until in steps or tokens, or use kind rows or tokens",
        )
    ]


def _check_place(loaded_config: Loaded, world_size: int) -> None:
    """Raise ConfigError if the config contradicts the number of ranks, or a package is missing."""
    problems = [
        *rank_checks(loaded_config.config, world_size),
        *missing_libraries(loaded_config.config.record),
    ]
    for extension in active_extensions(loaded_config.config.extension_names):
        if extension.missing:
            problems += load_target(extension.missing)(loaded_config.config)
    if problems:
        raise ConfigError(
            *(
                loaded_config.problem(problem.keys[0], problem.message, problem.hint)
                for problem in problems
            )
        )


def _value(config: RunConfig, key: str) -> object:
    section, _, field = key.partition(".")
    return getattr(getattr(config, section), field)


def _with(config: RunConfig, values: Mapping[str, object]) -> RunConfig:
    updates: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, field = key.partition(".")
        updates.setdefault(section, {})[field] = value
    sections: dict[str, BaseModel] = {
        name: getattr(config, name).model_copy(update=fields) for name, fields in updates.items()
    }
    return config.model_copy(update=sections)


@contextmanager
def _collecting(problems: list[ConfigProblem]) -> Iterator[None]:
    """Context manager that collects the problems of a ConfigError, so that later checks run too."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems
