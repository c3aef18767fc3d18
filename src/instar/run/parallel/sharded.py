"""Each rank holds some rows of every parameter, gradient and optimizer state: torch's `fully_shard`.

Parameters are gathered for one block at a time. A forward pass is a collective, so all ranks run
equally many: one without samples of its own runs a stand-in whose loss counts nothing.

The gradients of a step's slices are added in the same tree as those of `VirtualRanks`: slice
turn · W + rank belongs to a rank, so the reduction of each turn adds a complete subtree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.nn import Linear, Module, ModuleList, Parameter

from instar.config.schema import RunConfig
from instar.data.loader import StepBatch
from instar.distributed.agree import collective
from instar.distributed.all_reduce import Subtrees, norms_of_rows, row_squares, tree_sum
from instar.distributed.failure import RunFailed
from instar.distributed.shards import to_local
from instar.distributed.world import World
from instar.models.experts import ExpertLinear
from instar.models.module import check_shardable, copy_buffers, is_meta, load_buffers, materialize
from instar.run.parallel.strategy import MicroBatchCalls, Rounds, freeze, share_buffers


class Sharded:
    """A `Strategy` that shards the model over all ranks, or over groups of ranks that are replicas."""

    forward_is_collective = True
    rounds: Rounds | None = None

    def __init__(self, config: RunConfig, world: World, bare: Module, shards: int) -> None:
        """
        Args:
            bare: the model on the CPU or on this rank's device, equal on all ranks, or on the meta
                device, whose parameters then have any values; sharded in place.
            shards: number of ranks that share one copy of the model; divides the world size.

        Raises:
            ValueError: a parameter cannot be sharded, see `check_shardable`.
        """
        check_shardable(bare)
        self.world = world
        self._config = config
        self._elastic = config.reproducible == "elastic"
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise RunFailed(
                f"parallel.strategy {config.parallel.strategy} needs torch 2.13 or later, this is "
                f"{torch.__version__}; use strategy: ddp"
            )
        self._shards, self._replicas = _meshes(world, shards)
        if config.compile:
            torch.compiler.reset()  # see `compiled`
        self._gather = RoundedAllGather()
        rounds = config.parallel.fsdp.gather == "bfloat16" and config.precision == "bf16"
        reshard = config.parallel.fsdp.reshard_after_forward
        offload = config.parallel.fsdp.offload
        pin_memory = world.device.type == "cuda"
        policy = CPUOffloadPolicy(pin_memory=pin_memory) if offload else OffloadPolicy()
        place = partial(fully_shard, mesh=self._shards, offload_policy=policy)
        shard = partial(place, reshard_after_forward=reshard)
        for block in blocks(bare):
            if config.compile:
                _compile(block)
            linear = [m for m in block.modules() if rounds and isinstance(m, Linear | ExpertLinear)]
            if linear:
                shard(linear)
                cast(FSDPModule, linear[0]).set_custom_all_gather(self._gather)  # type: ignore[arg-type]
            if block not in linear:
                shard(block)
        # the backward pass begins with the root: torch keeps it whole in between
        self._root: FSDPModule = place(bare)
        if is_meta(bare):  # each rank allocates its rows only
            materialize(bare, world.device, host=offload)
        self.bare: Module = bare
        self.parameters: dict[str, Parameter] = dict(bare.named_parameters())
        self._set_reductions()

    @property
    def model(self) -> Module:
        return self.bare

    def _set_reductions(self) -> None:
        tree = self._elastic or self.world.device.type == "cpu"
        for module in self.bare.modules():
            if not isinstance(module, FSDPModule):
                continue
            # sums, not means; gloo has no sum of scaled values
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # as many reductions on each rank, whichever parameters its samples use
            module.set_reduce_scatter_unused_params(True)
            if tree:
                module.set_custom_reduce_scatter(TreeReduceScatter())  # type: ignore[arg-type]
            if self._replicas is not None:
                module.set_all_reduce_hook(partial(self._add_replicas, self._replicas))

    def _add_replicas(self, replicas: DeviceMesh, gradients: Tensor) -> None:
        """Add a block's reduced gradients over the replicas, in place."""
        group = replicas.get_group()
        if not self._elastic:
            dist.all_reduce(gradients, group=group)
            return
        everyones = gradients.new_empty(replicas.size(), len(gradients))
        dist.all_gather(list(everyones.unbind()), gradients, group=group)
        gradients.copy_(tree_sum(everyones))

    def accumulate(self, batch: StepBatch, calls: MicroBatchCalls) -> None:
        # every forward pass is a collective
        calls.before_sync()
        # as under DDP with one rank per slice, see `VirtualRanks`
        before, after = copy_buffers(self.bare), None
        gradients: dict[str, Tensor] = {}
        sums, size = Subtrees(), self.world.size
        for first in range(0, len(batch.passes), size):
            if after is not None:
                load_buffers(self.bare, before)
            passes = max(batch.passes[first : first + size])
            self._run_slice(batch, first + self.world.rank, passes, calls)
            gradients_now = self._take_gradients()
            # the sums will be in the tensors of the first turn
            gradients = gradients or gradients_now
            sums.add([to_local(gradient) for gradient in gradients_now.values()])
            if after is None:
                after = copy_buffers(self.bare)
        roots = sums.root(len(batch.passes) // size)
        if self._elastic and roots:
            torch._foreach_add_(roots, 0.0)  # no −0, as where gradients are added to zeros
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient
        load_buffers(self.bare, after or {})
        if self._elastic:
            share_buffers(self.world, self.bare)

    def _run_slice(
        self, batch: StepBatch, number: int, passes: int, calls: MicroBatchCalls
    ) -> None:
        """Run a slice's micro-batches, and as many stand-ins as make `passes`; reduce the sum of their
        gradients."""
        micro_batches = [micro for micro in batch.micro_batches if micro.rank == number]
        for index in range(passes):
            micro = micro_batches[min(index, len(micro_batches) - 1)]
            counts = index < len(micro_batches) and micro.samples > 0
            buffers = {} if counts else copy_buffers(self.bare)
            # without communication, gradients of the passes before the last are kept whole
            self._root.set_requires_gradient_sync(
                index == passes - 1 or self._config.parallel.fsdp.reduce_each_micro_batch
            )
            loss = calls.forward(micro if counts else replace(micro, samples=0))
            calls.backward(loss / batch.weight if counts else loss * 0.0)
            if not counts:
                # running statistics must not include stand-in samples
                load_buffers(self.bare, buffers)

    def _take_gradients(self) -> dict[str, Tensor]:
        """Return the gradients, and clear them."""
        gradients = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        for parameter in self.parameters.values():
            parameter.grad = None
        return gradients

    def norms(self, groups: Sequence[Sequence[Tensor]]) -> Tensor:
        """See `Strategy`. The bits do not depend on the number of shards."""
        tensors = [tensor for group in groups for tensor in group]
        if not tensors:
            return torch.zeros(len(groups), dtype=torch.float64, device=self.world.device)
        ranks = self._shards.size()
        heights = [-(-tensor.shape[0] // ranks) for tensor in tensors]
        squares = [row_squares(to_local(tensor)) for tensor in tensors]
        padded_rows = [F.pad(s, (0, h - len(s))) for s, h in zip(squares, heights, strict=True)]
        # rows may be in host memory, where a GPU's process group does not send from
        my_norms = torch.cat(padded_rows).to(self.world.device)
        everyones = my_norms.new_empty(ranks, len(my_norms))
        with collective(self.world, "adding the gradients' norms"):
            dist.all_gather(list(everyones.unbind()), my_norms, group=self._shards.get_group())
        columns = torch.split(everyones, heights, dim=1)
        squares_by_row = (
            column.flatten()[: tensor.shape[0]]
            for tensor, column in zip(tensors, columns, strict=True)
        )
        return norms_of_rows([[next(squares_by_row) for _ in group] for group in groups])

    def freeze(self, patterns: Sequence[str]) -> None:
        freeze(self.parameters, patterns)

    @contextmanager
    def evaluating(self, values: Mapping[str, Tensor] | None) -> Iterator[None]:
        weights = (
            {} if values is None else {n: to_local(p).clone() for n, p in self.parameters.items()}
        )
        try:
            self._gather.rounds = False
            # assigning `Parameter.data` would leave the rows that are gathered as they are
            for name, value in (values or {}).items():
                to_local(self.parameters[name]).copy_(to_local(value))
            yield
        finally:
            # after a forward pass without gradients the root is still whole
            self._root.reset_iter_state()
            self._gather.rounds = True
            for name, value in weights.items():
                to_local(self.parameters[name]).copy_(value)

    def in_double(self, shell: Module) -> Sharded:
        double = Sharded(self._config, self.world, shell.double(), self._shards.size())
        for name, parameter in self.parameters.items():
            to_local(double.parameters[name]).copy_(to_local(parameter))
        load_buffers(double.bare, dict(self.bare.named_buffers()))
        return double

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.reset_iter_state()


def check_groups(model: Module) -> None:
    """Check that `fully_shard` takes all parameters of a module, and those together that are gathered together.

    Raises:
        ValueError: it does not; names the parameters and what to write instead.
    """
    check_shardable(model)
    seen_ids: set[int] = set()
    for module in (*blocks(model), model):
        group = {
            n: p for n, p in module.named_parameters() if p.requires_grad and id(p) not in seen_ids
        }
        seen_ids |= set(map(id, group.values()))
        by_type = {parameter.dtype: name for name, parameter in group.items()}
        if len(by_type) > 1:
            types = " and ".join(f"{name} is of {dtype}" for dtype, name in by_type.items())
            raise ValueError(
                f"{types}, and sharded models gather them together, as one type: put those of each type into blocks of "
                "their own in an nn.ModuleList, or set parallel.strategy: ddp"
            )


def blocks(model: Module) -> list[Module]:
    """Return the modules that are gathered one at a time: the outermost that a `ModuleList` lists and that are
    called, if no other module has one of their parameters."""
    uses = Counter(map(id, _parameters(model)))
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    modules: list[Module] = []
    inside: set[int] = set()
    for module_list in model.modules():
        for block in module_list if isinstance(module_list, ModuleList) else ():
            # a block may be listed several times, and use a parameter several times
            own_uses = Counter(map(id, _parameters(block)))
            is_alone = all(
                uses[parameter] == n * places[id(block)] for parameter, n in own_uses.items()
            )
            has_forward = type(block).forward is not Module.forward  # a dict of modules is not
            if own_uses and is_alone and has_forward and id(block) not in inside:
                modules.append(block)
                inside |= {id(module) for module in block.modules()}
    return modules


def _parameters(module: Module) -> Iterator[Parameter]:
    """Yield parameters, once for each of their names."""
    return (parameter for _, parameter in module.named_parameters(remove_duplicate=False))


def _compile(block: Module) -> None:
    """Compile a block's forward pass in training; evaluations run it as it is, as with whole models."""
    eager, compiled = block.forward, torch.compile(block.forward)

    def forward(*arguments: object, **keywords: object) -> object:
        return (compiled if torch.is_grad_enabled() else eager)(*arguments, **keywords)

    # not the module: hooks that gather parameters stay outside, and names are as before
    block.forward = forward


def _meshes(world: World, shards: int) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh of the ranks that share a model, which are neighbours, and the mesh of the ranks
    that hold the same rows, if there are several."""
    device = world.device.type
    if shards == world.size:  # needs no further process groups
        return init_device_mesh(device, (shards,), mesh_dim_names=("shard",)), None
    shape = world.size // shards, shards
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    return mesh["shard"], mesh["replicate"]


class _Allocates:
    """What `fully_shard` asks of a collective besides calling it."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return an uninitialized tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class TreeReduceScatter(_Allocates):
    """Reduce-scatter for `fully_shard` that adds the ranks' tensors in a binary tree, see `tree_sum`.

    The ranks of the group are the leaves in order. A rank receives the pieces that it adds in one
    all-to-all, which on gloo is also faster than its own reduce-scatter.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        """Set `output_tensor` to the sum over all ranks of this rank's piece of `input_tensor`."""
        all_rows = torch.empty_like(input_tensor)
        dist.all_to_all_single(all_rows, input_tensor, group=group)
        output_tensor.copy_(tree_sum(all_rows.view(group.size(), -1)))


class RoundedAllGather(_Allocates):
    """All-gather for `fully_shard` that sends parameters as bfloat16.

    For parameters that autocast rounds to bfloat16 wherever they are used.
    """

    def __init__(self) -> None:
        self.rounds = True
        """False where there is no autocast"""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        """Set `output_tensor` to the `input_tensor` of all ranks, one after the other."""
        rounds = self.rounds and output_tensor.dtype == torch.float32  # else they are bytes
        kind = torch.bfloat16 if rounds else output_tensor.dtype
        output_bytes = torch.empty_like(output_tensor, dtype=kind)
        input_bytes = input_tensor.to(kind)
        dist.all_gather_single(
            output_bytes.view(torch.uint8), input_bytes.view(torch.uint8), group=group
        )
        output_tensor.copy_(output_bytes)
