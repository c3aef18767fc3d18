"""What one step does to each group of parameters: how large its gradient is, how far it moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

Norms = Mapping[str, float]


def group_of(name: str) -> str:
    """The layer that a parameter belongs to: `blocks.3` of `blocks.3.mlp.up.weight`, else its
    first word.
    """
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if rest and rest[0].isdigit() else first


class LayerWatch:
    """Looks at one step: `before` its update, when gradients are whole and not yet clipped, and
    `after` it. Keeps a copy of the weights in between.
    """

    def __init__(self) -> None:
        self.grad_norm: Norms = {}
        self.update_ratio: Norms = {}
        """‖Δw‖ / ‖w‖ of each group"""
        self._weights: dict[str, Tensor] = {}

    def before(self, parameters: Mapping[str, Parameter]) -> None:
        gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        self.grad_norm = _norms(gradients)
        self._weights = {n: parameters[n].detach().clone() for n in gradients}

    def after(self, parameters: Mapping[str, Parameter]) -> None:
        sizes = _norms(self._weights)
        moved = _norms({n: parameters[n].detach() - old for n, old in self._weights.items()})
        self._weights = {}
        self.update_ratio = {g: moved[g] / size for g, size in sizes.items() if size > 0}


def _norms(tensors: Mapping[str, Tensor]) -> Norms:
    """The Euclidean norm of each group; one trip to the device for all."""
    groups: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(group_of(name), []).append(tensor)
    norms = [_together(group) for group in groups.values()]
    return dict(zip(groups, torch.stack(norms).tolist(), strict=True)) if norms else {}


def _together(tensors: Iterable[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(list(tensors)).float()
