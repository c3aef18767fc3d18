"""Tensors that every rank holds whole, or of which it holds some rows: the same calls for both.

A sharded tensor is a `DTensor` whose rows are divided among the ranks of a mesh, in order: each has
⌈rows / ranks⌉ of them, the last ones fewer or none. It carries its own layout.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether this rank holds some rows of the tensor, not all of it."""
    # importing the module takes a while, and without it there are no sharded tensors
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, without a copy; written in place, it changes the tensor.

    Not differentiable.
    """
    return (tensor._local_tensor if is_sharded(tensor) else tensor).detach()


def whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor, without a copy if this rank holds it. A collective if it is sharded."""
    found: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return found.detach()


def part(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that all ranks hold whole, laid out as `like`, which may have another dtype.

    Copied if `like` is sharded. A tensor of another shape, such as an optimizer's count of steps, is
    returned as it is.
    """
    if not is_sharded(like) or tensor.shape != like.shape:
        return tensor
    first, last = rows(like)
    local = tensor[first:last].to(like._local_tensor.device, copy=True).contiguous()
    return as_sharded(local, like)


def as_sharded(local: Tensor, like: DTensor) -> DTensor:
    """Return the sharded tensor, laid out as `like`, of which this rank holds the rows `local`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def rows(tensor: Tensor) -> tuple[int, int]:
    """Return the first row of a tensor that this rank holds, and the one after the last."""
    total = tensor.shape[0] if tensor.ndim else 1
    if not is_sharded(tensor):
        return 0, total
    from torch.distributed.tensor import Shard

    (dim,) = (n for n, each in enumerate(tensor.placements) if isinstance(each, Shard))
    each = -(-total // tensor.device_mesh.size(dim))
    first = min(total, tensor.device_mesh.get_local_rank(dim) * each)
    return first, min(total, first + each)
