"""One optimizer step: accumulate, clip, check, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch.nn import Module, Parameter

from instar.config.schema import RunConfig
from instar.data.columns import Columns, Ragged, leaves
from instar.data.reader import MicroBatch, StepBatch
from instar.distributed.parallel import unwrap
from instar.distributed.world import World
from instar.run.alarm import GradientWatch
from instar.run.generators import seed_generators
from instar.run.gradients import Gradients
from instar.run.layers import LayerWatch
from instar.run.optimizer import set_learning_rate
from instar.tasks.task import Batch, Task

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepResult:
    """What one step did."""

    loss_sum: torch.Tensor
    """this rank's summed loss, a float64 scalar on the device"""
    grad_norm: float
    """norm of the global gradient before clipping; not finite if the step was skipped"""

    @property
    def skipped(self) -> bool:
        return not math.isfinite(self.grad_norm)


@runtime_checkable
class KnowsSteps(Protocol):
    """A model of which a part enters gradually."""

    def set_step(self, step: int) -> None:
        """The next forward pass belongs to this step."""
        ...


def enter(model: Module, step: int) -> None:
    """Tell a model that changes with the steps where it is; `model`: without wrappers."""
    if isinstance(model, KnowsSteps):
        model.set_step(step)


def to_device(arrays: Columns, device: torch.device) -> Batch:
    """A micro-batch's arrays as tensors on the device, by name; nested names are joined by dots.

    A ragged column becomes its values end to end, and beside them `<name>.offsets`.
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
    """Makes optimizer steps on one model; owns the gradients, the scaler and the moving average."""

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
        """sees every step's global gradient, before clipping"""
        self.layers: LayerWatch | None = None
        """sees the next step"""
        self.ema_decay = config.train.ema
        self.ema = (
            {name: p.detach().clone() for name, p in self.parameters.items()}
            if self.ema_decay is not None
            else None
        )

    @property
    def bare_model(self) -> Module:
        """The model without its DDP wrapper, for forward passes that ranks make on their own."""
        return unwrap(self.model)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The moving average in place of the weights, where one is kept."""
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
        """The precision of forward passes."""
        return torch.autocast(
            self.world.device.type,
            dtype=DTYPES[self.precision],
            enabled=self.precision != "fp32",
        )

    def step(
        self, batch: StepBatch, step: int, lr: float, before_sync: Callable[[], None]
    ) -> StepResult:
        """Consume a global batch's share of this rank and update the weights.

        The loss is divided by the weight of the *global* batch, so neither the world size nor
        the accumulation changes the gradient. Ranks meet once; `before_sync` is called as late as
        leaving is still safe.

        Raises:
            whatever `before_sync` raises.
        """
        set_learning_rate(self.optimizers, lr)
        enter(self.bare_model, step)
        loss_sum = self.gradients.accumulate(
            batch, partial(self._forward, step), self._backward, before_sync
        )
        return StepResult(loss_sum, self._update())

    def _forward(self, step: int, micro: MicroBatch) -> torch.Tensor:
        self.world.moved()
        if self.seed is not None:
            # nothing need be remembered, and it does not matter which rank runs a micro-batch
            seed_generators(self.seed, step, micro.first)
        with self.autocast():
            return self.task.loss_sum(self.model, to_device(micro.arrays, self.world.device))

    def _backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(self.scaler.scale(loss))

    def _update(self) -> float:
        """Clip and update, unless the gradient is not finite. Returns its norm.

        Every rank holds the same reduced gradient, so all of them decide alike.
        """
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        if self.watch is not None:
            self.watch.see({n: p.grad for n, p in self.parameters.items() if p.grad is not None})
        if self.layers is not None:
            self.layers.before(self.parameters)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm_tensor = torch.nn.utils.get_total_norm(gradients)
        norm = norm_tensor.item()
        if math.isfinite(norm):
            if self.clip is not None and norm > self.clip:
                torch._foreach_mul_(gradients, self.clip / norm)
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            if self.ema is not None and self.ema_decay is not None:
                torch._foreach_lerp_(
                    list(self.ema.values()),
                    [p.detach() for p in self.parameters.values()],
                    1.0 - self.ema_decay,
                )
        if self.layers is not None:
            self.layers.after(self.parameters)
        if self.scaler.is_enabled():
            self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return norm
