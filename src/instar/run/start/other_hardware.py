"""What a run would take on devices that are not here: its config for them, the estimate, and what helps if it does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from instar.config.checks import extension_conflicts
from instar.config.errors import ConfigError
from instar.config.fields import with_values
from instar.config.load import Loaded
from instar.config.schema import RunConfig
from instar.record.format import bytes_text
from instar.run.start.preflight import Prepared, preflight, sharding_problems
from instar.schedule.forecast import forecast
from instar.schedule.hardware.devices import Hardware, parse_hardware
from instar.schedule.hardware.estimate import (
    COMPILED_SHARE,
    EAGER_SHARE,
    Assumptions,
    Estimate,
    Fit,
    arithmetic_of,
    estimate,
    fit_of,
)
from instar.schedule.hardware.estimate_text import render_estimate
from instar.schedule.memory import FORECAST_SHARE
from instar.tasks.task import Say, TaskSpec


@dataclass(frozen=True)
class OtherHardware:
    """A checked run on devices that are not here."""

    hardware: Hardware
    checked_run: Prepared
    precision: str
    estimate: Estimate
    remedy: str
    """what makes it fit; empty: it fits, or nothing is known"""

    def text(self) -> str:
        """Return the estimate as lines."""
        remark = self.checked_run.spec.flops_remark
        return render_estimate(self.estimate, self.checked_run.forecast, self.remedy, remark)


def forecast_on(
    loaded_config: Loaded, devices: str, utilization: float | None, assume: Say
) -> OtherHardware:
    """Check a run, and estimate what it takes on these devices, with a rank on each. No torch, unless the task needs it.

    Args:
        devices: such as 8xH100.
        utilization: share of their speed that is reached; None: what is usual for compiled or uncompiled models.
        assume: see `preflight`; also told which keys of the config do not count.

    Raises:
        ConfigError: lists all mistakes.
    """
    hardware = parse_hardware(devices)
    if utilization is None:
        utilization = COMPILED_SHARE if loaded_config.config.compile else EAGER_SHARE
    for key, value in _keys_of_place(loaded_config.config).items():
        assume(f"{key} {value} does not count: --on has {hardware.devices} devices")
    loaded_config = _with_values(loaded_config, {"device": "cuda", "parallel.devices": ()})
    config, kinds = loaded_config.config, hardware.device.peak_flops
    if config.precision == "auto" and "bf16" not in kinds:
        loaded_config = _with_values(loaded_config, {"precision": "fp32"})
    elif config.precision in ("bf16", "fp16") and config.precision not in kinds:
        message = f"precision {config.precision}: {hardware.device.name} has no units for it"
        raise ConfigError(loaded_config.problem("precision", message, "precision: fp16, or auto"))
    checked_run = preflight(loaded_config, hardware.devices, assume=assume)
    config, spec = checked_run.config, checked_run.spec
    precision = config.precision
    if precision == "auto":
        precision = "fp32" if spec.fp32_reason("cuda") else "bf16"
    if config.parallel.strategy == "auto":
        strategy = _strategy(loaded_config, checked_run, hardware)
        config = with_values(config, {"parallel.strategy": strategy})
        spec = dataclasses.replace(spec, config=config)
        stages = forecast(config, spec, hardware.devices)
        checked_run = dataclasses.replace(checked_run, config=config, spec=spec, forecast=stages)
    assumptions = Assumptions(
        hardware,
        utilization,
        arithmetic_of(config, precision, hardware),
        config.train.gradient_checkpointing,
    )
    result = estimate(checked_run.forecast, config, spec, assumptions)
    remedy = _remedy(loaded_config, checked_run, hardware) if result.fit.fits is False else ""
    return OtherHardware(hardware, checked_run, precision, result, remedy)


def _keys_of_place(config: RunConfig) -> Mapping[str, object]:
    """Return the keys that say where a run is on this machine, and contradict that it is elsewhere."""
    parallel = config.parallel
    keys = {
        "device": config.device if config.device != "auto" else None,
        "parallel.world_size": parallel.world_size,
        "parallel.devices": list(parallel.devices) or None,
    }
    return {key: value for key, value in keys.items() if value is not None}


def _with_values(loaded_config: Loaded, changes: Mapping[str, Any]) -> Loaded:
    return dataclasses.replace(loaded_config, config=with_values(loaded_config.config, changes))


def _strategy(loaded_config: Loaded, checked_run: Prepared, hardware: Hardware) -> str:
    """Return what `parallel.strategy: auto` becomes, as `resolve_strategy` does on the devices themselves."""
    limit = FORECAST_SHARE * hardware.device.memory_bytes
    if hardware.devices == 1 or checked_run.forecast.peak_bytes("ddp") <= limit:
        return "ddp"
    return "fsdp" if _can_shard(loaded_config, checked_run.spec, hardware) else "ddp"


def _can_shard(loaded_config: Loaded, spec: TaskSpec, hardware: Hardware) -> bool:
    if hardware.devices == 1:
        return False
    fsdp_config = _with_values(loaded_config, {"parallel.strategy": "fsdp"})
    conflicts = [
        *extension_conflicts(fsdp_config.config),
        *sharding_problems(fsdp_config, spec, spec.architecture, hardware.devices),
    ]
    return not conflicts


def _remedy(loaded_config: Loaded, checked_run: Prepared, hardware: Hardware) -> str:
    """Return which keys make a run fit, those first that change least; else what it takes at best."""
    device_bytes = hardware.device.memory_bytes
    smallest: Fit | None = None
    for changes in _candidates(loaded_config, checked_run, hardware):
        fit = _fit_with(changes, checked_run, hardware)
        if fit is None:
            continue
        if fit.needed_bytes <= FORECAST_SHARE * device_bytes:
            keys = ", ".join(f"{key}={_value_text(value)}" for key, value in changes.items())
            return f"with {keys} it needs {bytes_text(fit.needed_bytes)}"
        smallest = min((f for f in (smallest, fit) if f is not None), key=lambda f: f.needed_bytes)
    if smallest is None:
        return "use devices with more memory, or a smaller model"
    return (
        f"smaller micro-batches, gradient checkpointing and fsdp leave {bytes_text(smallest.needed_bytes)}: use more devices, "
        "or a smaller model"
    )


def _value_text(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def _candidates(
    loaded_config: Loaded, checked_run: Prepared, hardware: Hardware
) -> Iterator[dict[str, Any]]:
    """Yield changes of the config that leave the global batch as it is and need less memory."""
    config = checked_run.config
    size, passes = config.train.batch_size, config.train.gradient_accumulation_steps
    shards: list[dict[str, Any]] = [{}]
    if config.parallel.strategy == "ddp" and _can_shard(loaded_config, checked_run.spec, hardware):
        shards.append({"parallel.strategy": "fsdp"})
    checkpointing: list[dict[str, Any]] = [{}]
    if not config.train.gradient_checkpointing:
        checkpointing.append({"train.gradient_checkpointing": True})
    for strategy in shards:
        for recomputation in checkpointing:
            for micro in (n for n in range(size, 0, -1) if size % n == 0):
                batch = {
                    "train.batch_size": micro,
                    "train.gradient_accumulation_steps": passes * size // micro,
                }
                changes = {**(batch if micro < size else {}), **recomputation, **strategy}
                if changes:
                    yield changes


def _fit_with(changes: Mapping[str, Any], checked_run: Prepared, hardware: Hardware) -> Fit | None:
    """Return the fit of a changed run; None: its schedule cannot be carried out then."""
    config = with_values(checked_run.config, changes)
    spec = dataclasses.replace(checked_run.spec, config=config)
    try:
        changed_forecast = forecast(config, spec, hardware.devices)
    except ValueError:
        return None
    return fit_of(changed_forecast, config, hardware.device.memory_bytes)
