"""Tensors that every rank holds whole, or of which it holds some rows: the same calls for both.

A sharded tensor is a `DTensor` whose rows are divided among the ranks of a one-dimensional mesh, in order: each has
⌈rows / ranks⌉ of them, the last ones fewer or none. It carries its own layout.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether this rank holds some rows of the tensor, not all of it."""
    # importing the module takes a while, and without it there are no sharded tensors
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, without a copy; written in place, it changes the tensor.

    Not differentiable.
    """
    return (tensor._local_tensor if is_sharded(tensor) else tensor).detach()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a whole tensor, without a copy if this rank holds it. A collective if it is sharded."""
    if not is_sharded(tensor):
        return tensor.detach()
    # rows may be in host memory, where a GPU's process group does not send from
    device_tensor = cast("DTensor", tensor.to(tensor.device_mesh.device_type))
    dimension = _dimension_of_rows(device_tensor)
    if dimension is None:
        return device_tensor.full_tensor().detach()
    return _gather_rows(device_tensor, dimension)


def _dimension_of_rows(tensor: DTensor) -> int | None:
    """Return the dimension of its mesh that divides a tensor's rows; None if anything else is divided."""
    from torch.distributed.tensor import Shard

    dimensions = [dim for dim, place in enumerate(tensor.placements) if not place.is_replicate()]
    if len(dimensions) != 1:
        return None
    place = tensor.placements[dimensions[0]]
    # not a subclass, which divides otherwise
    return dimensions[0] if type(place) is Shard and place.dim == 0 else None


def _gather_rows(tensor: DTensor, dimension: int) -> Tensor:
    """Gather the rows that a dimension of the mesh divides. A collective.

    Not by DTensor's own `full_tensor`, which may damage the memory of a process on gloo, see decision 62.
    """
    local, ranks = tensor._local_tensor.detach(), tensor.device_mesh.size(dimension)
    if not tensor.numel():
        return local.new_empty(tensor.shape)
    height = -(-tensor.shape[0] // ranks)
    if len(local) < height:
        local = torch.cat([local, local.new_zeros(height - len(local), *local.shape[1:])])
    rows = local.new_empty(ranks * height, *local.shape[1:])
    dist.all_gather(
        list(rows.view(ranks, -1).view(torch.uint8).unbind()),  # gloo does not support every dtype
        local.reshape(-1).view(torch.uint8),
        group=tensor.device_mesh.get_group(dimension),
    )
    return rows[: tensor.shape[0]]


def distribute_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that all ranks hold whole, laid out as `like`, which may have another dtype.

    Copied if `like` is sharded, or has another order in memory. A tensor of another shape, such as an
    optimizer's count of steps, or one that is sharded already, is returned as it is.
    """
    if is_sharded(tensor) or tensor.shape != like.shape:
        return tensor
    if not is_sharded(like):
        return in_order_of(tensor, like)
    local = local_rows(tensor, like).to(like._local_tensor.device, copy=True).contiguous()
    return as_sharded(local, like)


@torch.no_grad()
def redistribute_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that all ranks hold whole with the layout of another of its shape, on any mesh.

    Without communication; copied if the other is sharded, or has another order in memory.
    """
    if not is_sharded(like):
        return in_order_of(tensor, like)
    # with it comes torch's compiler, which most trainings start without
    from torch.distributed.tensor import distribute_tensor

    mesh, places = like.device_mesh, like.placements
    result = distribute_tensor(tensor.to(mesh.device_type), mesh, places, src_data_rank=None)
    return result.to(like.device)


def in_order_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor in the order in memory in which torch's optimizers keep the state of a parameter of its shape.

    Fused optimizers walk the memory of parameter, gradient and state side by side, and do not look at strides: a
    state in another order is that of other elements. Both are whole; copied if the order differs.
    """
    if tensor.stride() == like.stride():
        return tensor
    copy = torch.empty_like(like, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor) if copy.stride() != tensor.stride() else tensor


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements, in some order, fill a block of memory: then its states have its strides."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def local_rows(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the rows of a tensor that this rank holds of `like`, which has its shape, without a copy.

    Args:
        tensor: whole, or laid out as `like`.
    """
    if is_sharded(tensor) or not is_sharded(like):
        return to_local(tensor)
    first, last = local_row_range(like)
    return tensor[first:last]


def as_sharded(local: Tensor, like: DTensor) -> DTensor:
    """Return the sharded tensor, laid out as `like`, of which this rank holds the rows `local`."""
    return type(like).from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def local_row_range(tensor: Tensor, rank: int | None = None) -> tuple[int, int]:
    """Return the first row of a tensor that a rank of its mesh holds, by default this one, and the one
    after the last."""
    total = tensor.shape[0] if tensor.ndim else 1
    if not is_sharded(tensor):
        return 0, total
    rows_per_rank = -(-total // tensor.device_mesh.size())
    first = min(
        total, rows_per_rank * (tensor.device_mesh.get_local_rank() if rank is None else rank)
    )
    return first, min(total, first + rows_per_rank)


def on_owners(
    like: Sequence[DTensor],
    parts: Sequence[Tensor],
    function: Callable[[list[Tensor]], list[Tensor]],
    first_owner: int = 0,
) -> list[Tensor]:
    """Apply a function to whole tensors, each on one of the ranks that hold rows of it. A collective.

    Two all-to-alls, there and back. A rank holds no more than its share of the tensors whole.

    Args:
        like: tensors of the same mesh.
        parts: this rank's rows of tensors laid out as these, all of one dtype.
        function: maps some of the tensors, whole, to others of the same shapes and dtype.
        first_owner: tensor i is given to rank `first_owner` + i, modulo the number of ranks.

    Returns:
        this rank's rows of the results.
    """
    mesh = like[0].device_mesh
    ranks, rank = mesh.size(), mesh.get_local_rank()
    exchange = partial(_exchange, mesh.get_group(), parts[0].new_empty(0))
    indices_of = [range((peer - first_owner) % ranks, len(like), ranks) for peer in range(ranks)]

    def heights(index: int) -> list[int]:
        return [
            last - first
            for first, last in (local_row_range(like[index], peer) for peer in range(ranks))
        ]

    heights_and_widths = [(heights(index), like[index].shape[1:]) for index in indices_of[rank]]
    full_parts = exchange(
        [[parts[index] for index in indices] for indices in indices_of],
        [[(height[peer], *width) for height, width in heights_and_widths] for peer in range(ranks)],
    )
    results = function([torch.cat(pieces) for pieces in zip(*full_parts, strict=True)])
    split = [
        torch.split(tensor, height)
        for tensor, (height, _) in zip(results, heights_and_widths, strict=True)
    ]
    local_parts = exchange(
        [[pieces[peer] for pieces in split] for peer in range(ranks)],
        [[tuple(parts[index].shape) for index in indices] for indices in indices_of],
    )
    by_index = {
        index: tensor
        for indices, tensors in zip(indices_of, local_parts, strict=True)
        for index, tensor in zip(indices, tensors, strict=True)
    }
    return [by_index[index] for index in range(len(like))]


def _exchange(
    group: dist.ProcessGroup,
    empty: Tensor,
    outgoing: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
) -> list[list[Tensor]]:
    """Send tensors to each rank of a group; return those that each rank has sent, which have these shapes.

    A collective.

    Args:
        empty: a tensor without elements, of the tensors' dtype and device.
    """
    sizes = [[math.prod(shape) for shape in peer] for peer in shapes]
    flat = torch.cat([empty, *(tensor.reshape(-1) for peer in outgoing for tensor in peer)])
    incoming = flat.new_empty(sum(map(sum, sizes)))
    width = flat.element_size()
    dist.all_to_all_single(
        incoming.view(torch.uint8),  # gloo does not support every dtype
        flat.view(torch.uint8),
        [width * sum(peer) for peer in sizes],
        [width * sum(tensor.numel() for tensor in peer) for peer in outgoing],
        group=group,
    )
    pieces = iter(torch.split(incoming, [size for peer in sizes for size in peer]))
    return [[next(pieces).view(shape) for shape in peer] for peer in shapes]


class GatheredTensors(Mapping[str, Tensor]):
    """Tensors by name, each gathered when it is asked for.

    A collective if they are sharded: all ranks ask for the same in the same order.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return full_tensor(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
