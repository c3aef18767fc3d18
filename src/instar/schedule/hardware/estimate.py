"""How long a run takes on given devices, by its FLOPs and a share of their peak, and whether it fits into their memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from instar.config.budget import parse_budget
from instar.config.schema import RunConfig
from instar.schedule.forecast import Forecast, Stage, Totals
from instar.schedule.hardware.devices import Arithmetic, Hardware
from instar.schedule.memory import FORECAST_SHARE, in_force
from instar.schedule.triggers import evaluates_at_start
from instar.tasks.task import TaskSpec

COMPILED_SHARE, EAGER_SHARE = 0.4, 0.25
"""Share of the peak that a training step is assumed to reach, communication included: GPT-2 124M on an H200 reached 0.39
compiled, and took 1.6 times as long otherwise (docs/benchmarks.md; docs/scaling.md compares published runs)."""
_RECOMPUTED = 4 / 3
"""FLOPs of a step with gradient checkpointing: a second forward pass, a third of what the others take."""
_FORWARD = 1 / 3
"""Share of a forward pass in the FLOPs of a forward and backward pass."""


@dataclass(frozen=True)
class Assumptions:
    """On what an estimate rests."""

    hardware: Hardware
    utilization: float
    """share of the peak, above 0 and at most 1"""
    arithmetic: Arithmetic
    """in which most FLOPs are done"""
    recomputes: bool
    """whether gradient checkpointing repeats the forward pass"""

    @property
    def device_flops(self) -> float:
        """FLOPs per second of a device."""
        return self.utilization * self.hardware.device.peak_flops[self.arithmetic]


@dataclass(frozen=True)
class Fit:
    """Whether a run fits into the memory of a device."""

    needed_bytes: int
    """tensors at the peak of the run on a rank"""
    device_bytes: int
    stage: int
    """index of the stage that needs most"""
    offloaded_bytes: int
    """what a rank keeps in host memory besides"""
    is_complete: bool
    """whether activations are among the needed bytes"""

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None: not known without the activations."""
        if self.needed_bytes > FORECAST_SHARE * self.device_bytes:
            return False
        return True if self.is_complete else None


@dataclass(frozen=True)
class StageTime:
    """Times of a stage."""

    step_s: float
    compute_s: float
    """of the rank with the most samples"""
    link_s: float
    """what sending takes at least, over the links of a host"""
    hiding_bytes: float
    """bytes per second that a device must send for communication to take no longer than what is computed"""
    units_per_s: float
    """what counts in the loss, per second"""
    balance: float
    """mean share of the samples of the rank with the most that a rank has"""
    evaluation_s: float | None
    """of an evaluation; None: the size of the held-out data is not known"""


@dataclass(frozen=True)
class Duration:
    """The seconds of a run."""

    training_s: float
    evaluations: int
    evaluations_s: float
    """0 where their length is not known"""

    @property
    def total_s(self) -> float:
        return self.training_s + self.evaluations_s


@dataclass(frozen=True)
class Estimate:
    """What a run takes on other hardware."""

    assumptions: Assumptions
    fit: Fit
    paces: tuple[StageTime, ...]
    """of each stage; empty: its FLOPs are not known"""
    early: Duration | None
    """if every operation fires at its earliest; None: the run has no known end"""
    late: Duration | None
    limit_s: float | None
    """the run's budget of time; None: it has none"""
    units_within_limit: float | None
    """what the run trains on in that time, operations at their earliest; None: no limit, or it comes later"""
    checkpoint_bytes: int

    @property
    def longest_s(self) -> float | None:
        """Seconds of the longer of both cases, at most the budget of time; None: unknown."""
        ends = [duration.total_s for duration in (self.early, self.late) if duration is not None]
        limits_s = [limit for limit in (max(ends, default=None), self.limit_s) if limit is not None]
        return min(limits_s, default=None)

    @property
    def device_hours(self) -> float | None:
        """Hours of all devices together; None: unknown."""
        seconds = self.longest_s
        return None if seconds is None else seconds * self.assumptions.hardware.devices / 3600

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values, and what follows from them."""
        hardware = self.assumptions.hardware
        return asdict(self) | {
            "hardware": str(hardware),
            "devices": hardware.devices,
            "fits": self.fit.fits,
            "longest_s": self.longest_s,
            "device_hours": self.device_hours,
        }


def arithmetic_of(config: RunConfig, precision: str, hardware: Hardware) -> Arithmetic:
    """Return in what a device multiplies matrices in a precision: `fp32` with `tf32`, where it has units for that.

    Raises:
        ValueError: the device has no units for this precision.
    """
    kinds = hardware.device.peak_flops
    if precision == "fp32":
        may_use_tf32 = config.tf32 and config.reproducible != "elastic"
        return "tf32" if may_use_tf32 and "tf32" in kinds else "fp32"
    kind: Arithmetic = "bf16" if precision == "bf16" else "fp16"
    if kind not in kinds:
        raise ValueError(f"{hardware.device.name} has no units for {kind}")
    return kind


def fit_of(forecast: Forecast, config: RunConfig, device_bytes: int) -> Fit:
    """Return whether a run fits into devices with this memory, under the strategy of its config."""
    strategy = in_force(config, forecast.world_size)
    ranks = [stage.memory[strategy] for stage in forecast.stages]
    offloads = config.parallel.fsdp.offload and strategy in ("fsdp", "hsdp")
    needs = [rank.peak - (rank.kept_bytes if offloads else 0) for rank in ranks]
    stage = max(range(len(needs)), key=needs.__getitem__)
    host_bytes = max(rank.kept_bytes for rank in ranks) if offloads else 0
    is_complete = all("activations" in stage.memory_bytes for stage in forecast.stages)
    return Fit(needs[stage], device_bytes, stage, host_bytes, is_complete)


def estimate(
    forecast: Forecast, config: RunConfig, spec: TaskSpec, assumptions: Assumptions
) -> Estimate:
    """Estimate the time and the memory of a run; `forecast` is of as many ranks as there are devices."""
    paces: tuple[StageTime, ...] = ()
    if not spec.flops_remark and all(stage.flops_per_token for stage in forecast.stages):
        paces = tuple(_pace(stage, config, spec, assumptions) for stage in forecast.stages)
    budgets = [parse_budget(text) for text in config.train.until]
    limits = [budget.amount for budget in budgets if budget.kind == "seconds"]
    limit_s = min(limits, default=None)
    held_bytes = [stage.memory["ddp"].step for stage in forecast.stages]
    return Estimate(
        assumptions,
        fit_of(forecast, config, assumptions.hardware.device.memory_bytes),
        paces,
        _duration(forecast, config, paces, forecast.early, is_early=True),
        _duration(forecast, config, paces, forecast.late, is_early=False),
        limit_s,
        _units_within(forecast, paces, limit_s),
        max(sum(parts.get(n, 0) for n in ("weights", "optimizer", "ema")) for parts in held_bytes),
    )


def _pace(stage: Stage, config: RunConfig, spec: TaskSpec, assumptions: Assumptions) -> StageTime:
    settings, hardware = stage.settings, assumptions.hardware
    elastic = config.reproducible == "elastic"
    slices = config.parallel.elastic.virtual_ranks if elastic else hardware.devices
    samples = -(-settings.global_batch // slices) * max(1, slices // hardware.devices)
    sample_flops = spec.computed_units(settings.context) * stage.flops_per_token
    factor = _RECOMPUTED if assumptions.recomputes else 1.0
    compute_s = samples * sample_flops * factor / assumptions.device_flops
    sent_bytes = stage.memory[in_force(config, hardware.devices)].sent
    link_s = sent_bytes / hardware.device.link_bytes
    step_s = max(compute_s, link_s)
    per_evaluation = _evaluation_flops(stage, config, spec)
    of_all = assumptions.device_flops * hardware.devices
    return StageTime(
        step_s,
        compute_s,
        link_s,
        sent_bytes / compute_s,
        settings.global_batch * stage.weight / step_s,
        settings.global_batch / (samples * hardware.devices),
        None if per_evaluation is None else per_evaluation / of_all,
    )


def _evaluation_flops(stage: Stage, config: RunConfig, spec: TaskSpec) -> float | None:
    """Return the FLOPs of an evaluation in a stage; None: the size of the held-out data is not known."""
    context = config.eval.context or stage.settings.context
    sizes, iters = spec.split_sizes(context), stage.settings.eval_iters
    limit = math.inf if iters is None else iters * config.train.batch_size
    samples = float(min(limit, _size_of(sizes, "val")))
    for held_out in config.eval.sets:
        every = held_out.eval_interval or stage.settings.eval_interval
        share = min(1.0, stage.settings.eval_interval / every)
        samples += share * min(limit, _size_of(sizes, held_out.name))
    if math.isinf(samples):
        return None
    return samples * _FORWARD * spec.computed_units(context) * stage.flops_per_token


def _size_of(sizes: Mapping[str, int | None], name: str) -> float:
    size = sizes.get(name)
    return math.inf if size is None else size


def _duration(
    forecast: Forecast,
    config: RunConfig,
    paces: tuple[StageTime, ...],
    totals: Totals | None,
    *,
    is_early: bool,
) -> Duration | None:
    if not paces or totals is None:
        return None
    training_s, evaluations_s, evaluations = 0.0, 0.0, 0
    for stage, pace, begin, span in _stages_with_steps(forecast, paces, is_early=is_early):
        if span is None:
            return None
        # the last step of an epoch is smaller, and takes its share of a whole one
        step_flops = stage.settings.global_batch * stage.weight * stage.flops_per_token
        training_s += span.flops / step_flops * pace.step_s
        number = _evaluations(stage, config, begin, span.steps)
        is_last = begin + span.steps == totals.steps
        number += int(begin == 0 and evaluates_at_start(config))
        number += int(is_last and totals.steps % _interval(stage, config) != 0)
        evaluations += number
        evaluations_s += number * (pace.evaluation_s or 0.0)
    return Duration(training_s, evaluations, evaluations_s)


def _stages_with_steps(
    forecast: Forecast, paces: tuple[StageTime, ...], *, is_early: bool
) -> Iterator[tuple[Stage, StageTime, int, Totals | None]]:
    """Yield each stage with steps: its pace, first step and totals, None: it has no known end."""
    for stage, pace in zip(forecast.stages, paces, strict=True):
        begin = stage.first_step if is_early else stage.latest_step
        span = stage.early if is_early else stage.late
        if begin is not None and (span is None or span.steps):
            yield stage, pace, begin, span


def _interval(stage: Stage, config: RunConfig) -> int:
    epochs, steps = config.eval.eval_epochs, stage.steps_per_epoch
    return epochs * steps if epochs and steps else stage.settings.eval_interval


def _evaluations(stage: Stage, config: RunConfig, begin: int, steps: int) -> int:
    """Return the evaluations of a stage, which are at multiples of an interval."""
    interval = _interval(stage, config)
    return (begin + steps) // interval - begin // interval


def _units_within(
    forecast: Forecast, paces: tuple[StageTime, ...], limit_s: float | None
) -> float | None:
    """Return what a run trains on until its budget of time ends it; None: no such budget, or another ends it before."""
    if limit_s is None or not paces:
        return None
    remaining_s, units = limit_s, 0.0
    for _, pace, _, span in _stages_with_steps(forecast, paces, is_early=True):
        limit = math.inf if span is None else span.tokens
        units += min(limit, remaining_s * pace.units_per_s)
        remaining_s -= min(remaining_s, limit / pace.units_per_s)
        if remaining_s <= 0:
            return units
    return None
