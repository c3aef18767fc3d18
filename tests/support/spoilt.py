"""Tensors in memory that are damaged, each in turn and in several ways, and mended again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor


def _permute(tensor: Tensor) -> Tensor:
    return tensor.flatten().roll(1).view(tensor.shape)


def _one_element(tensor: Tensor) -> Tensor:
    result = tensor.clone()
    result.view(-1)[-1] += 1 if not tensor.is_floating_point() else 1e-3
    return result


DAMAGES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "nan": lambda tensor: torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 77),
    "times 30": lambda tensor: tensor * 30,
    "permuted": _permute,
    "one element": _one_element,
}


@torch.no_grad()
def damage_in_turn(tensors: Mapping[str, Tensor], *, ways: int = len(DAMAGES)) -> Iterator[str]:
    """Damages one tensor after the other in so many of the ways that change it, of which each has its turn; yields what,
    and mends it after."""
    for number, (name, tensor) in enumerate(tensors.items()):
        original = tensor.detach().clone()
        changes = [(kind, damage(original)) for kind, damage in DAMAGES.items()]
        changes = [(kind, value) for kind, value in changes if not torch.equal(value, original)]
        for way in range(min(ways, len(changes))):
            kind, value = changes[(number + way) % len(changes)]
            tensor.data.copy_(value)
            yield f"{kind}: {name}"
            tensor.data.copy_(original)
