"""Optimizer step: accumulate gradients, check and clip their norm, update the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, cast, runtime_checkable

import torch
from torch.nn import Module, Parameter

from instar.config.schema import RunConfig
from instar.data.columns import Columns, Ragged, leaves
from instar.data.loader import MicroBatch, StepBatch
from instar.distributed.agree import raise_on_all_ranks
from instar.distributed.parallel import copy_from_rank_0, unwrap, wrap
from instar.distributed.world import World
from instar.models.module import held_buffers, load_buffers
from instar.record.system import has_bf16_units, measure_peak_flops
from instar.run.loop.dead_parameters import GradientWatch
from instar.run.loop.generators import seed_generators
from instar.run.loop.gradients import (
    DataParallel,
    Gradients,
    LayerStats,
    VirtualRanks,
    share_buffers,
)
from instar.run.loop.optimizer import build_optimizers, set_learning_rate
from instar.schedule.settings import is_frozen
from instar.tasks.task import Batch, Task


@dataclass(frozen=True)
class StepResult:
    """Result of one step."""

    loss_sum: torch.Tensor
    """this rank's summed loss, a float64 scalar on the device"""
    grad_norm: float
    """norm of the global gradient before clipping; not finite if the step was skipped"""

    @property
    def skipped(self) -> bool:
        return not math.isfinite(self.grad_norm)


@runtime_checkable
class KnowsSteps(Protocol):
    """A model whose forward pass depends on the step, e.g. new parts that fade in gradually."""

    def set_step(self, step: int) -> None:
        """Set the step of the next forward pass."""
        ...


def enter(model: Module, step: int) -> None:
    """Set the step of a model that `KnowsSteps`; no effect on others.

    Args:
        model: without wrappers.
    """
    if isinstance(model, KnowsSteps):
        model.set_step(step)


def to_device(arrays: Columns, device: torch.device) -> Batch:
    """Copy a micro-batch's arrays to the device, by name; nested names are joined by dots.

    A ragged column becomes its concatenated values and `<name>.offsets`.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, column in leaves(arrays):
        if isinstance(column, Ragged):
            tensors[name] = torch.from_numpy(column.flat)
            tensors[f"{name}.offsets"] = torch.from_numpy(column.offsets - column.offsets[0])
        else:
            tensors[name] = torch.from_numpy(column)
    if device.type == "cpu":
        return tensors
    return {
        name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()
    }


class Stepper:
    """Runs the optimizer steps of a model; owns gradients, gradient scaler and moving average."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        task: Task,
        model: Module,
        gradients: Gradients,
        parameters: Mapping[str, Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.task, self.model, self.world, self.optimizers = task, model, world, optimizers
        self.gradients, self.parameters = gradients, dict(parameters)
        self.clip = config.train.clip
        self.precision = config.precision
        random = task.random or config.reproducible == "elastic"
        self.seed = config.seed if random else None
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=config.precision == "fp16")
        self.watch: GradientWatch | None = None
        """observes every step's global gradient, before clipping"""
        self.layers: LayerStats | None = None
        """observes the next step"""
        self.ema_decay = config.train.ema
        self.ema = (
            {name: p.detach().clone() for name, p in self.parameters.items()}
            if self.ema_decay is not None
            else None
        )

    @property
    def bare_model(self) -> Module:
        """The model without its DDP wrapper, for rank-local forward passes."""
        return unwrap(self.model)

    def share_buffers(self) -> None:
        """Broadcast rank 0's persistent buffers, as DDP does. A collective."""
        share_buffers(self.world, self.bare_model)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Context manager: use the moving average, if there is one, in place of the weights."""
        if self.ema is None:
            yield
            return
        weights = [p.data for p in self.parameters.values()]
        for parameter, average in zip(self.parameters.values(), self.ema.values(), strict=True):
            parameter.data = average
        try:
            yield
        finally:
            for parameter, weight in zip(self.parameters.values(), weights, strict=True):
                parameter.data = weight

    def autocast(self) -> torch.autocast:
        """Return the autocast context of forward passes."""
        return torch.autocast(
            self.world.device.type,
            dtype=DTYPES[self.precision],
            enabled=self.precision != "fp32",
        )

    def step(
        self, batch: StepBatch, step: int, lr: float, before_sync: Callable[[], None]
    ) -> StepResult:
        """Run this rank's share of a global batch and update the weights. A collective.

        The loss is divided by the weight of the *global* batch, so neither the world size nor
        gradient accumulation changes the gradient.

        Args:
            before_sync: called at the latest point where it is safe to leave by an exception: the
                ranks synchronize once, after it. What it raises is propagated.
        """
        set_learning_rate(self.optimizers, lr)
        enter(self.bare_model, step)
        buffers = held_buffers(self.bare_model)
        loss_sum = self.gradients.accumulate(
            batch, partial(self._forward, step), self._backward, before_sync
        )
        result = StepResult(loss_sum, self._update())
        if result.skipped:
            # otherwise one non-finite batch would spoil running statistics permanently
            load_buffers(self.bare_model, buffers)
        return result

    def _forward(self, step: int, micro: MicroBatch) -> torch.Tensor:
        self.world.moved()
        if self.seed is not None:
            # no state to save, and the result does not depend on which rank runs a micro-batch
            seed_generators(self.seed, step, micro.first)
        with self.autocast():
            return self.task.loss_sum(self.model, to_device(micro.arrays, self.world.device))

    def _backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(self.scaler.scale(loss))

    def _update(self) -> float:
        """Clip and update, unless the gradient is not finite; return its norm.

        Every rank has the same reduced gradient, so all ranks decide alike.
        """
        # GradScaler rejects an optimizer whose parameters are all frozen
        training = [optimizer for optimizer in self.optimizers if _has_gradients(optimizer)]
        for optimizer in training:
            self.scaler.unscale_(optimizer)
        if self.watch is not None:
            self.watch.update({n: p.grad for n, p in self.parameters.items() if p.grad is not None})
        if self.layers is not None:
            self.layers.before(self.parameters)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm_tensor = torch.nn.utils.get_total_norm(gradients)
        norm = norm_tensor.item()
        if math.isfinite(norm):
            if self.clip is not None and norm > self.clip:
                torch._foreach_mul_(gradients, self.clip / norm)
            for optimizer in training:
                self.scaler.step(optimizer)
            if self.ema is not None and self.ema_decay is not None:
                torch._foreach_lerp_(
                    list(self.ema.values()),
                    [p.detach() for p in self.parameters.values()],
                    1.0 - self.ema_decay,
                )
        if self.layers is not None:
            self.layers.after(self.parameters)
        if self.scaler.is_enabled() and training:
            self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return norm


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def build_stepper(
    config: RunConfig, world: World, task: Task, bare: Module, frozen: Sequence[str] = ()
) -> Stepper:
    """Build a stepper: optimizers without state, and the model wrapped for all ranks. A collective.

    Args:
        bare: the model without wrappers, on this rank's device.
        frozen: patterns of frozen parameters, see `is_frozen`.

    Raises:
        PeerError: a rank failed.
    """
    copy_from_rank_0(world, bare)
    with raise_on_all_ranks(world, "preparing the model for training"):
        parameters = dict(bare.named_parameters())
        _freeze(bare, frozen)
        model, gradients = _on_all_ranks(config, world, bare)
        return Stepper(
            config,
            world,
            task,
            model,
            gradients,
            parameters,
            build_optimizers(parameters, config.optimizer),
        )


def freeze(stepper: Stepper, config: RunConfig, frozen: Sequence[str]) -> None:
    """Change the frozen parameters; optimizers keep their state. A collective."""
    bare = stepper.bare_model
    with raise_on_all_ranks(stepper.world, "freezing parameters"):
        _freeze(bare, frozen)
        # DDP reads requires_grad only when it wraps the model
        stepper.model, stepper.gradients = _on_all_ranks(config, stepper.world, bare)


def _freeze(bare: Module, frozen: Sequence[str]) -> None:
    for name, parameter in bare.named_parameters():
        parameter.requires_grad_(not is_frozen(frozen, name))


def _on_all_ranks(config: RunConfig, world: World, bare: Module) -> tuple[Module, Gradients]:
    """Wrap a model for all ranks; return it, and what accumulates its gradients."""
    if config.reproducible == "elastic":
        number = config.parallel.elastic.virtual_ranks
        return bare, VirtualRanks(world, bare, number)
    model = bare
    if config.compile:
        # graphs of earlier shapes count against torch's recompile limit, and make sizes dynamic
        torch.compiler.reset()
        model = cast(Module, torch.compile(bare))
    # wrap last: DDP must see the model on its device, and compiled
    wrapped = wrap(model, world, config.parallel.ddp)
    return wrapped, DataParallel(world, wrapped, config.parallel.ddp)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_REMEASUREMENTS = 3
"""number of repeated measurements of the peak: the machine may be busy when a run starts"""
_SHORT_S = {"cpu": 0.02, "cuda": 0.1}


class PeakFlops:
    """Peak FLOP/s of the device: the highest speed measured in the run itself or in matrix products
    (in the precision in use or in fp32, whichever is faster)."""

    def __init__(
        self, device: torch.device, precision: Literal["auto", "fp32", "bf16", "fp16"], ranks: int
    ) -> None:
        """
        Args:
            ranks: number of ranks that work concurrently, this one included.
        """
        self._device, self._ranks = device, ranks
        # compared only with itself, a slow dtype would look fast; on GPUs fp32 is never faster
        cpu_types = ("fp32",) if device.type == "cpu" else ()
        self._dtypes = {name: DTYPES[name] for name in (*cpu_types, precision) if name in DTYPES}
        self._remaining_measurements = MAX_REMEASUREMENTS
        self._precision = precision
        self.measured = {
            name: measure_peak_flops(str(device), dtype) for name, dtype in self._dtypes.items()
        }
        self._best = ranks * max(self.measured.values())

    def share(self, flops_per_s: float) -> float:
        """Return the model FLOPs utilization at this speed, ≤ 1; a higher speed raises the peak."""
        self._best = max(self._best, flops_per_s)
        return flops_per_s / self._best

    def measure_again(self) -> None:
        """Measure the peak again, briefly, between two steps; at most `MAX_REMEASUREMENTS` times."""
        if self._remaining_measurements == 0:
            return
        self._remaining_measurements -= 1
        fastest = max(self.measured, key=self.measured.__getitem__)
        limit = _SHORT_S[self._device.type]
        seen = measure_peak_flops(str(self._device), self._dtypes[fastest], limit)
        self._best = max(self._best, self._ranks * seen)

    @property
    def warning(self) -> str:
        """Warning that the configured precision is slower than fp32 on this CPU; else empty."""
        if self._device.type != "cpu" or self._precision != "bf16" or has_bf16_units():
            return ""
        times = self.measured["fp32"] / self.measured["bf16"]
        if times <= 1.0:
            return ""
        return (
            "precision: bf16 on a processor without bf16 units: matrix products take "
            f"{times:.1f} times as long as in fp32; precision: auto chooses fp32 here"
        )
