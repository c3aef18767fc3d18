"""Optimizer step: accumulate gradients, check and clip their norm, update the weights.

The gradient of the global batch is left in `Parameter.grad`, the same on every rank. The rest of a
step does not depend on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from instar.config.schema import DDPConfig, RunConfig
from instar.data.columns import Columns, Ragged, leaves
from instar.data.loader import MicroBatch, StepBatch
from instar.distributed.agree import gather, raise_on_all_ranks
from instar.distributed.all_reduce import DeterministicAllReduce
from instar.distributed.parallel import (
    ForwardCollectives,
    broadcast_from_rank_0,
    copy_from_rank_0,
    sync,
    unwrap,
    wrap,
)
from instar.distributed.world import World
from instar.models.module import has_buffers, held_buffers, load_buffers, persistent_buffers
from instar.record.system import torch_dtype
from instar.run.loop.generators import seed_generators
from instar.run.loop.gradient_stats import GradientWatch, LayerStats
from instar.run.loop.optimizer import set_learning_rate, task_optimizers
from instar.schedule.settings import is_frozen
from instar.tasks.logged import weighted
from instar.tasks.task import Batch, Task


@dataclass(frozen=True)
class StepResult:
    """Result of one step."""

    loss_sum: Tensor
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
    tensors: dict[str, Tensor] = {}
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


class MicroBatchCalls(NamedTuple):
    """What accumulating the gradients of a step calls."""

    forward: Callable[[MicroBatch], Tensor]
    """returns a micro-batch's summed loss"""
    backward: Callable[[Tensor], None]
    """adds a loss's gradients to those of the parameters"""
    before_sync: Callable[[], None]
    """called at the latest point where it is safe to leave by an exception: the ranks synchronize
    once, after it"""


class DataParallel:
    """DDP: each rank runs one slice; the all-reduce overlaps the last backward pass."""

    def __init__(self, world: World, model: Module, ddp: DDPConfig) -> None:
        """
        Args:
            model: newly wrapped by `wrap`.
        """
        self.world, self.model = world, model
        self.collectives = ForwardCollectives(model, ddp)
        self._new_static_graph = world.size > 1 and ddp.static_graph

    def accumulate(self, batch: StepBatch, calls: MicroBatchCalls) -> Tensor:
        """Run this rank's micro-batches and reduce their gradients; return its summed loss, a float64
        scalar on the device. A collective."""
        # DDP averages over ranks; undo that to get the sum
        scale = self.world.size / batch.weight
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        # as late as possible, so that the exchange overlaps with forward and backward passes
        early = self.collectives.next_may_communicate()
        if early:
            calls.before_sync()
        passes = [(micro, micro.samples > 0) for micro in batch.micro_batches]
        # DDP records a static graph in its first backward pass, which must reduce. The averaged
        # gradients are the same on all ranks, so averaging them again changes nothing. All ranks
        # must reduce equally often, so a rank with a single micro-batch runs it twice.
        learns = self._new_static_graph and self._some_rank_accumulates(len(passes))
        if learns and len(passes) == 1:
            passes.insert(0, (replace(passes[0][0], samples=0), False))
        self._new_static_graph = False
        for index, (micro, counts) in enumerate(passes):
            last = index == len(passes) - 1
            # no_sync must be entered before the forward pass, in which DDP decides
            held = {} if counts else held_buffers(unwrap(self.model))
            with sync(self.model, enabled=last or (learns and index == 0)):
                loss = calls.forward(micro)
                if last and not early:
                    calls.before_sync()
                calls.backward(loss * (scale if counts else 0.0))
            if counts:
                total += loss.detach()
            else:
                # running statistics must not include stand-in samples, or a sample twice
                load_buffers(unwrap(self.model), held)
        self.collectives.reduced()
        return total

    def _some_rank_accumulates(self, micro_batches: int) -> bool:
        return any(cast(int, number) > 1 for number in gather(self.world, micro_batches))


class VirtualRanks:
    """`reproducible: elastic`: a fixed number of slices, independent of the world size.

    The gradient of each slice is accumulated separately; the gradients of all slices are added in a
    fixed tree, so that no bit depends on the number of ranks.
    """

    def __init__(self, world: World, model: Module, number: int) -> None:
        """
        Args:
            model: without wrappers.
            number: number of slices.
        """
        self.world, self.model = world, model
        by_type: dict[torch.dtype, list[Parameter]] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                by_type.setdefault(parameter.dtype, []).append(parameter)
        self.parts = [
            (
                parameters,
                DeterministicAllReduce(world, number, sum(p.numel() for p in parameters), dtype),
            )
            for dtype, parameters in by_type.items()
        ]
        """per dtype: the parameters, and the all-reduce of their gradients"""

    def accumulate(self, batch: StepBatch, calls: MicroBatchCalls) -> Tensor:
        """See `DataParallel`."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        # each slice starts with the buffers from before the step, and the model keeps those of the
        # first slice, as under DDP with one rank per slice
        before, after = held_buffers(self.model), None
        for _, micro_batches in groupby(batch.micro_batches, lambda micro: micro.rank):
            if after is not None:
                load_buffers(self.model, before)
            gradients = [tree.leaf() for _, tree in self.parts]
            self._point_to(gradients)
            for micro in micro_batches:
                if micro.samples:
                    loss = calls.forward(micro)
                    calls.backward(loss / batch.weight)
                    total += loss.detach()
            for (_, tree), gradient in zip(self.parts, gradients, strict=True):
                tree.add(gradient)
            if after is None:
                after = held_buffers(self.model)
        calls.before_sync()
        self._point_to([tree.root() for _, tree in self.parts])
        load_buffers(self.model, after or {})
        share_buffers(self.world, self.model)
        return total

    def _point_to(self, flats: Sequence[Tensor]) -> None:
        """Make the parameters' gradients views of flat tensors, one per dtype."""
        for (parameters, _), flat in zip(self.parts, flats, strict=True):
            pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)


def share_buffers(world: World, model: Module) -> None:
    """Broadcast rank 0's persistent buffers, as DDP does. A collective."""
    # every rank has built the same module, so either all ranks broadcast or none
    if world.size > 1 and has_buffers(model):
        buffers = broadcast_from_rank_0(world, persistent_buffers(model), "sharing buffers")
        if not world.is_main:
            load_buffers(model, buffers)


class Stepper:
    """Runs the optimizer steps of a model; owns gradients, gradient scaler and moving average."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        task: Task,
        model: Module,
        gradients: DataParallel | VirtualRanks,
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
            dtype=torch_dtype(self.precision),
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
        calls = MicroBatchCalls(partial(self._forward, step), self._backward, before_sync)
        loss_sum = self.gradients.accumulate(batch, calls)
        result = StepResult(loss_sum, self._update())
        if result.skipped:
            # otherwise one non-finite batch would spoil running statistics permanently
            load_buffers(self.bare_model, buffers)
        return result

    def _forward(self, step: int, micro: MicroBatch) -> Tensor:
        self.world.moved()
        if self.seed is not None:
            # no state to save, and the result does not depend on which rank runs a micro-batch
            seed_generators(self.seed, step, micro.first)
        with self.autocast(), weighted(micro.samples):
            return self.task.loss_sum(self.model, to_device(micro.arrays, self.world.device))

    def _backward(self, loss: Tensor) -> None:
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
            task_optimizers(task, bare, config.optimizer),
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


def _on_all_ranks(
    config: RunConfig, world: World, bare: Module
) -> tuple[Module, DataParallel | VirtualRanks]:
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
