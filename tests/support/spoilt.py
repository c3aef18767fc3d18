"""Tensors in memory that are damaged, each in turn and in several ways, and mended again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor


def _permuted(tensor: Tensor) -> Tensor:
    return tensor.flatten().roll(1).view(tensor.shape)


def _one_element(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[-1] += 1 if not tensor.is_floating_point() else 1e-3
    return changed


DAMAGES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "nan": lambda tensor: torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 77),
    "times 30": lambda tensor: tensor * 30,
    "permuted": _permuted,
    "one element": _one_element,
}


@torch.no_grad()
def spoilt(tensors: Mapping[str, Tensor], *, ways: int = len(DAMAGES)) -> Iterator[str]:
    """Damages one tensor after the other in so many of the ways that change it, of which each has its turn; yields what,
    and mends it after."""
    for number, (name, tensor) in enumerate(tensors.items()):
        kept = tensor.detach().clone()
        changes = [(kind, damage(kept)) for kind, damage in DAMAGES.items()]
        changes = [(kind, changed) for kind, changed in changes if not torch.equal(changed, kept)]
        for way in range(min(ways, len(changes))):
            kind, changed = changes[(number + way) % len(changes)]
            tensor.data.copy_(changed)
            yield f"{kind}: {name}"
            tensor.data.copy_(kept)
