"""A run's state as named tensors and JSON: what a checkpoint holds, and how it is taken up again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from instar.config.operation import Operation
from instar.schedule.operations import Change, History


def optimizer_tensors(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, Parameter]
) -> dict[str, torch.Tensor]:
    """Every tensor that the optimizers remember, as `<parameter>/<name of the state>`."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    return {
        f"{names[parameter]}/{key}": tensor
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, tensor in state.items()
    }


def load_optimizer_tensors(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, Parameter],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Give optimizers back what `optimizer_tensors` took from them."""
    owner = {
        parameter: optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for key, tensor in tensors.items():
        name, _, field = key.rpartition("/")
        parameter = parameters[name]
        # a fused optimizer keeps its step count on the CPU or beside its parameter
        device = parameter.device if tensor.ndim or parameter.is_cuda else torch.device("cpu")
        owner[parameter].state[parameter][field] = tensor.to(device)


def copy_tensors(into: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Overwrite tensors in place by name.

    Raises:
        ValueError: names or shapes differ.
    """
    if into.keys() != tensors.keys():
        raise ValueError(f"names differ: {sorted(into.keys() ^ tensors.keys())[:8]}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if into[name].shape != tensor.shape:
                raise ValueError(f"{name}: {tuple(tensor.shape)}, not {tuple(into[name].shape)}")
            into[name].copy_(tensor)


def history_to_json(history: History) -> list[dict[str, Any]]:
    """A history as JSON values."""
    return [dataclasses.asdict(change) for change in history]


def history_from_json(entries: Sequence[Mapping[str, Any]]) -> History:
    """The inverse of `history_to_json`."""
    return tuple(
        Change(**{**entry, "operation": Operation(**entry["operation"])}) for entry in entries
    )
