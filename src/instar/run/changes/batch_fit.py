"""The largest batch whose steps fit into a share of the device's memory: measured, and agreed by all ranks."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from instar.config.sections import Operation
from instar.data.source import Source
from instar.distributed.agree import gather, raise_on_all_ranks
from instar.models.cost import FrozenParameters
from instar.record.format import bytes_text
from instar.record.system import peak_bytes, usable_bytes
from instar.run.components import Components
from instar.run.state.run_state import RunState
from instar.run.step.stepper import to_device
from instar.schedule.memory import share_of
from instar.schedule.operations import State
from instar.schedule.settings import is_frozen

_TRIED_SHARE = 0.9
"""of what the process may use: a larger trial would risk the run for a measurement"""


def fit_batch(state: RunState, parts: Components, operation: Operation) -> tuple[Operation, str]:
    """Return `adjust_batch_size` with the largest `batch_size` that fits, and how that was found. A collective.

    Every rank runs micro-batches of the present size and of twice as many samples, as far as there is memory for them,
    without an update. Their peaks give the memory of a sample; where they do not differ, it is that of the forecast. The
    rank with the least room decides.

    Raises:
        ValueError: not even one sample would fit.
        PeerError: a rank failed.
    """
    world, settings = parts.world, state.settings
    share = share_of(parts.config, settings, world.size)
    with raise_on_all_ranks(world, "looking for the largest batch"):
        usable = _usable(parts)
    sizes = [share.batch_size, 2 * share.batch_size]
    per_sample = _forecast_of_sample(state.in_force, parts)
    # forward passes may be collectives: all ranks try the same
    rooms = cast("list[int]", gather(world, usable - peak_bytes(str(world.device))))
    if per_sample * share.batch_size > _TRIED_SHARE * min(rooms):
        sizes = [max(1, share.batch_size // 2), share.batch_size]
    with raise_on_all_ranks(world, "measuring a batch"):
        held_out = _as_long_as_trained(parts)
        peaks = [_peak(parts, held_out, size) for size in sizes]
        measured = (peaks[1] - peaks[0]) / max(1, sizes[1] - sizes[0])
        kind = "measured" if measured > 0 else "forecast"
        per_sample = measured if measured > 0 else per_sample
        if per_sample <= 0:
            raise ValueError(
                "the memory of a sample is too small to be measured, and this task forecasts none: use set_batch_size"
            )
        limit = operation.value * usable
        samples = math.floor(sizes[1] + (limit - peaks[1]) / per_sample)
    smallest = min(cast("list[int]", gather(world, samples)))
    if smallest < 1:
        raise ValueError(
            f"not even one sample fits into {operation.value:.0%} of the {bytes_text(usable)} that a rank may use: "
            f"what does not depend on the batch takes {bytes_text(peaks[1] - sizes[1] * per_sample)}"
        )
    batch_size = _batch_of(smallest, parts, settings.grad_accum)
    options = {**operation.options, "batch_size": batch_size}
    reason = (
        f"{smallest:,} samples fit into {operation.value:.0%} of {bytes_text(usable)}, "
        f"{bytes_text(per_sample)} each ({kind})"
    )
    return replace(operation, options=options), reason


def _usable(parts: Components) -> int:
    """Return the bytes that this rank may use of its device, which ranks of a host share if it is a CPU."""
    device = parts.world.device
    usable = usable_bytes(str(device))
    if device.type == "cuda":
        return usable
    own = peak_bytes("cpu")
    return own + max(0, usable - own) // parts.world.local_size


def _as_long_as_trained(parts: Components) -> Source:
    """Return held-out samples of the length of training samples, which those of evaluations may not have."""
    task = parts.task
    if task.held_out_context == task.context:
        return parts.validation
    return task.spec.held_out("val", task.context)


def _peak(parts: Components, held_out: Source, samples: int) -> int:
    """Return the peak memory of a micro-batch of so many held-out samples, repeated if there are fewer."""
    device = parts.world.device
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    peak_bytes(str(device), reset=True)
    batch = to_device(held_out.read(np.arange(samples) % len(held_out)), device)
    parts.stepper.try_micro_batch(batch, samples)
    return peak_bytes(str(device))


def _forecast_of_sample(state: State, parts: Components) -> float:
    """Return the forecast bytes of a sample's activations; 0: this task forecasts none."""
    architecture, spec = state.architecture, parts.task.spec
    names = [n for n in architecture.parameters() if is_frozen(state.settings.frozen, n)]
    frozen = FrozenParameters(frozenset(names), frozenset())
    kind = "cuda" if parts.world.device.type == "cuda" else "cpu"
    one, two = (
        sum(spec.memory(architecture, state.settings.context, size, kind, frozen).values())
        for size in (8, 16)
    )
    return (two - one) / 8


def _batch_of(samples: int, parts: Components, grad_accum: int) -> int:
    """Return the largest batch size of which no micro-batch of a rank has more samples."""
    config, size = parts.config, parts.world.size
    elastic = config.reproducible == "elastic"
    slices = config.parallel.elastic.virtual_ranks if elastic else size
    return samples if grad_accum >= slices else max(1, samples * slices // grad_accum)
