"""Optimizer step: accumulate gradients, check and clip their norm, update the weights.

The strategy leaves the gradient of the global batch in `Parameter.grad`, whole or in parts. The rest
of a step does not depend on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from instar.config.schema import RunConfig
from instar.data.columns import Columns, Ragged, leaves
from instar.data.loader import MicroBatch, StepBatch
from instar.distributed.agree import raise_on_all_ranks, reduce_sums
from instar.distributed.shards import GatheredTensors, to_local
from instar.distributed.world import World
from instar.models.module import copy_buffers, load_buffers
from instar.record.device import torch_dtype
from instar.run.muon import lerp
from instar.run.optimizer import (
    OUTER_MOMENTUM,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
    split_groups,
    task_optimizers,
)
from instar.run.parallel.choose import parallelize
from instar.run.parallel.strategy import MicroBatchCalls, RoundEnd, Strategy, share_buffers
from instar.run.rates import Update, rate_factors
from instar.run.state.generators import generators_kept, seed_generators
from instar.run.state.gradient_stats import (
    GradientWatch,
    GradNorm,
    LayerStats,
    PartNorm,
    Skips,
    part_of,
)
from instar.schedule.operations import State
from instar.tasks.logged import recording, weighted
from instar.tasks.task import Batch, Task


@dataclass(frozen=True)
class StepResult:
    """Result of one step."""

    loss_sum: Tensor
    """this rank's summed loss, a float64 scalar on the device"""
    norm: GradNorm
    """of the global gradient before clipping; not finite if the step was skipped"""
    scale: float = 1.0
    """by which the loss was multiplied, see `torch.amp.GradScaler`"""
    part: PartNorm | None = None
    """the gradient of a part of the batch, if it was measured"""


def set_model_step(model: Module, step: int) -> None:
    """Call `set_step(step)` of a model whose next forward pass depends on the step, e.g. new parts that
    fade in gradually; no effect on others.

    Args:
        model: without wrappers.
    """
    if (set_step := getattr(model, "set_step", None)) is not None:
        set_step(step)


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
    # arrays that were read ahead are pinned, see `Prefetcher`; others are copied before this returns
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


class Stepper:
    """Runs the optimizer steps of a model; owns gradients, gradient scaler and moving average."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        task: Task,
        strategy: Strategy,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.task, self.world, self.strategy, self.optimizers = task, world, strategy, optimizers
        self.clip = config.train.clip
        self.precision = config.precision
        self.compiles = config.compile
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
    def unwrapped_model(self) -> Module:
        """The model without wrappers, for evaluations."""
        return self.strategy.bare

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The parameters that the optimizers hold, by name."""
        return self.strategy.parameters

    def states(self) -> dict[str, Tensor]:
        """Return the states of the optimizers, and of an outer one, as `<parameter>/<state>`."""
        rounds = self.strategy.rounds
        outer = {} if rounds is None else rounds.momentum
        return optimizer_tensors(self.optimizers, self.parameters) | {
            f"{name}/{OUTER_MOMENTUM}": momentum for name, momentum in outer.items()
        }

    def load_states(self, states: Mapping[str, Tensor]) -> None:
        """Load what `states` returned, also of another strategy."""
        load_optimizer_tensors(self.optimizers, self.parameters, states)
        if (rounds := self.strategy.rounds) is not None:
            suffix = f"/{OUTER_MOMENTUM}"
            rounds.momentum = {
                name.removesuffix(suffix): states[name].to(self.world.device)
                for name in states
                if name.endswith(suffix)
            }

    def set_config(self, config: RunConfig, state: State, *, optimizers: bool) -> None:
        """Use other values of a config's keys for clipping, the moving average and, if `optimizers`, the optimizers,
        which keep their states.

        Args:
            state: settings and shapes in force.
        """
        self.clip, self.ema_decay = config.train.clip, config.train.ema
        if not optimizers:
            return
        states = self.states()
        self.optimizers = optimizers_of(config, self.task, self.strategy, state)
        self.load_states(states)

    def share_buffers(self) -> None:
        """Broadcast rank 0's persistent buffers, as DDP does. A collective."""
        share_buffers(self.world, self.unwrapped_model)

    def evaluating(self) -> AbstractContextManager[None]:
        """Context for forward passes of `unwrapped_model` without gradients, with the moving average, if
        there is one, in place of the weights."""
        return self.strategy.evaluating(self.ema)

    def autocast(self) -> torch.autocast:
        """Return the autocast context of forward passes."""
        return torch.autocast(
            self.world.device.type,
            dtype=torch_dtype(self.precision),
            enabled=self.precision != "fp32",
        )

    def step(
        self,
        batch: StepBatch,
        step: int,
        lr: float,
        before_sync: Callable[[], None],
        *,
        measures_part: bool = False,
    ) -> StepResult:
        """Run this rank's share of a global batch and update the weights. A collective.

        The loss is divided by the weight of the *global* batch, so neither the world size nor
        gradient accumulation changes the gradient.

        Args:
            before_sync: called at the latest point where it is safe to leave by an exception: the
                ranks synchronize once, after it. What it raises is propagated.
            measures_part: also measure the gradient of a part of the batch, which changes no bit of
                the update.
        """
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        if not batch.weight:  # there is nothing to learn from
            before_sync()
            self.layers = None
            return StepResult(loss_sum, GradNorm(0.0))
        set_learning_rate(self.optimizers, lr, step)
        set_model_step(self.unwrapped_model, step)
        buffers = copy_buffers(self.unwrapped_model)
        part = None
        with _shards_explained(), _buffers_restored(self.unwrapped_model, buffers):
            if measures_part:
                part = self._part_norm(batch, step, before_sync)
                load_buffers(self.unwrapped_model, buffers)
                before_sync = do_nothing
            forward = partial(self._forward, step, loss_sum=loss_sum)
            calls = MicroBatchCalls(forward, self._backward, before_sync)
            self.strategy.accumulate(batch, calls)
            scale = self.scaler.get_scale()
            result = StepResult(loss_sum, self._update(), scale, part)
        if buffers and not result.norm.finite:
            # otherwise one non-finite batch would spoil running statistics permanently
            load_buffers(self.unwrapped_model, buffers)
        return result

    def end_round(self, steps: int, n_skipped: int, skips: Skips) -> RoundEnd | None:
        """Make all ranks the same after some steps of their own; None: they are at every step.

        A collective.

        Args:
            steps: of the round.
            n_skipped: see `Rounds.end`.
            skips: with the last step.
        """
        if (rounds := self.strategy.rounds) is None:
            return None
        states = optimizer_tensors(self.optimizers, self.parameters)
        end = rounds.end(states, n_skipped, skips.in_a_row)
        if end.states is not None:
            for optimizer in self.optimizers:
                optimizer.state.clear()
            load_optimizer_tensors(self.optimizers, self.parameters, end.states)
        if end.finite:
            self._average(steps)
        return end

    def _average(self, steps: int, weight: Tensor | float = 1.0) -> None:
        """Add the weights to their moving average, as if it had been done after each of the last steps.

        Args:
            weight: 0 leaves the average as it is; may be on the device.
        """
        if self.ema is not None and self.ema_decay is not None:
            averages = [to_local(average) for average in self.ema.values()]
            weights = [to_local(self.parameters[name]).detach() for name in self.ema]
            lerp(averages, weights, (1.0 - self.ema_decay**steps) * weight)

    def _part_norm(self, batch: StepBatch, step: int, before_sync: Callable[[], None]) -> PartNorm:
        """Measure the gradient of a part of a global batch. A collective.

        It is accumulated and reduced as that of a whole step, so that with `reproducible: elastic` its
        bits do not depend on the number of ranks.
        """
        strategy = self.strategy
        part = part_of(batch, keep_size=self.compiles and self.world.size > 1)
        model = strategy.bare if self.compiles and self.world.size == 1 else None
        calls = MicroBatchCalls(
            partial(self._forward, step, model=model), self._backward, before_sync
        )
        with recording(None), generators_kept(self.world.device):
            strategy.accumulate(part, calls)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = strategy.norms([gradients]).item() / self.scaler.get_scale()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        squares = {
            "samples": sum(micro.samples for micro in part.micro_batches),
            "weight": sum(micro.weight for micro in part.micro_batches),
        }
        sums = reduce_sums(self.world, squares)
        # it was divided by the weight of the whole batch
        factor = batch.weight / sums["weight"] if sums["weight"] else math.nan
        return PartNorm(round(sums["samples"]), norm * factor)

    def try_micro_batch(self, batch: Batch, samples: int) -> None:
        """Run forward and backward passes as in training, which change no bit of the run. A collective."""
        buffers = copy_buffers(self.unwrapped_model)
        try:
            with recording(None), generators_kept(self.world.device):
                with self.autocast(), weighted(samples):
                    loss = self.task.loss_sum(self.unwrapped_model, batch)
                self._backward(loss)
        finally:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
            load_buffers(self.unwrapped_model, buffers)

    def _forward(
        self,
        step: int,
        micro: MicroBatch,
        *,
        model: Module | None = None,
        loss_sum: Tensor | None = None,
    ) -> Tensor:
        """Return the summed loss of a micro-batch, and add it to `loss_sum` unless it only stands in."""
        self.world.note_progress()
        if self.seed is not None:
            # no state to save, and the result does not depend on which rank runs a micro-batch
            seed_generators(self.seed, step, micro.first, self.world.device)
        with self.autocast(), weighted(micro.samples):
            batch = to_device(micro.arrays, self.world.device)
            loss = self.task.loss_sum(model or self.strategy.model, batch)
        if loss_sum is not None and micro.samples:
            loss_sum += loss.detach()
        return loss

    def _backward(self, loss: Tensor) -> None:
        torch.autograd.backward(self.scaler.scale(loss))

    def _update(self) -> GradNorm:
        """Clip and update, unless the gradient is not finite; return its norm.

        Every rank gets the same norm, so all ranks decide alike; in a round, each for itself.
        """
        # GradScaler rejects an optimizer whose parameters are all frozen
        training = [optimizer for optimizer in self.optimizers if _has_gradients(optimizer)]
        for optimizer in training:
            self.scaler.unscale_(optimizer)
        gradients = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        if self.watch is not None:
            self.watch.update(GatheredTensors(gradients))
        if self.layers is not None:
            self.layers.before(self.parameters)
        if self._decides_on_device(training):
            norm = self._clip_and_update_on_device(training, [*gradients.values()])
        else:
            norm = self._clip_and_update(training, [*gradients.values()])
        if self.layers is not None:
            self.layers.after(self.parameters)
        if self.scaler.is_enabled() and training:
            self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return norm

    def _clip_and_update(
        self, training: Sequence[torch.optim.Optimizer], gradients: Sequence[Tensor]
    ) -> GradNorm:
        norm = self.strategy.norms([gradients]).item()
        if math.isfinite(norm):
            if self.clip is not None and norm > self.clip:
                torch._foreach_mul_(
                    [to_local(gradient) for gradient in gradients], self.clip / norm
                )
            for optimizer in training:
                self.scaler.step(optimizer)
            if self.strategy.rounds is None:
                self._average(1)
        return GradNorm(norm)

    def _decides_on_device(self, training: Sequence[torch.optim.Optimizer]) -> bool:
        """Return whether a GPU can skip the update by itself, so that the host need not wait for the norm."""
        strategy = self.strategy
        return (
            self.world.device.type == "cuda"
            and not (
                self.scaler.is_enabled()
                or strategy.forward_is_collective
                or strategy.rounds is not None
            )
            and all(
                getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in training
            )
        )

    def _clip_and_update_on_device(
        self, training: Sequence[torch.optim.Optimizer], gradients: Sequence[Tensor]
    ) -> GradNorm:
        """As `_clip_and_update`, by what fused optimizers, and our Muon, have for `torch.amp.GradScaler`: they divide
        gradients by `grad_scale`, and change nothing where `found_inf` is 1."""
        (norm,) = self.strategy.norms([gradients])
        finite = norm.isfinite().float()
        scale = None if self.clip is None else (norm / self.clip).clamp_min(1.0).float()
        for optimizer in training:
            optimizer.grad_scale, optimizer.found_inf = scale, 1.0 - finite  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        self._average(1, finite)
        return GradNorm(norm)


def do_nothing() -> None:
    """Do nothing."""


@contextmanager
def _buffers_restored(model: Module, buffers: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Context manager that restores the buffers of a step that an exception ends: what is saved then has not made it."""
    try:
        yield
    except BaseException:
        load_buffers(model, buffers)
        raise


@contextmanager
def _shards_explained() -> Iterator[None]:
    """Context manager that adds a note to errors of operations that sharded parameters do not have."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if any(words in str(error) for words in ("DTensor", "Sharding propagation")):
            error.add_note(
                "Outside the model's forward(), sharded parameters are DTensors, for which torch does not "
                "have every operation: compute the loss from what forward() returns, choose another "
                "optimizer, or set parallel.strategy: ddp"
            )
        raise


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def build_stepper(
    config: RunConfig,
    world: World,
    task: Task,
    bare: Module,
    state: State,
    values: Mapping[str, Tensor] | None = None,
) -> Stepper:
    """Build a stepper: the model prepared for all ranks, and optimizers without state. A collective.

    Args:
        bare, values: see `parallelize`.
        state: settings and shapes in force, of which frozen parameters and groups of others follow.

    Raises:
        PeerError: a rank failed.
    """
    strategy = parallelize(config, world, bare, state.settings.frozen, values)
    with raise_on_all_ranks(world, "preparing the model for training"):
        return stepper_of(config, world, task, strategy, state)


def stepper_of(
    config: RunConfig, world: World, task: Task, strategy: Strategy, state: State
) -> Stepper:
    """Build a stepper of a model that is prepared for all ranks, with optimizers without state."""
    return Stepper(config, world, task, strategy, optimizers_of(config, task, strategy, state))


def optimizers_of(
    config: RunConfig, task: Task, strategy: Strategy, state: State
) -> list[torch.optim.Optimizer]:
    """Build the optimizers of a model that is prepared for all ranks, without state."""
    elastic = config.reproducible == "elastic"
    optimizers = task_optimizers(
        task, strategy.bare, config.optimizer, elastic=elastic, precision=config.precision
    )
    warmups, began = state.settings.new_param_warmups, state.began or state.architecture

    def factors(update: Update) -> Mapping[str, float]:
        return rate_factors(state.architecture, began, config.optimizer, update)

    if warmups or config.optimizer.follows_size:
        split_groups(optimizers, strategy.parameters, warmups, factors)
    return optimizers


def freeze_parameters(stepper: Stepper, frozen: Sequence[str]) -> None:
    """Change the frozen parameters; optimizers keep their state. A collective."""
    with raise_on_all_ranks(stepper.world, "freezing parameters"):
        stepper.strategy.freeze(frozen)
