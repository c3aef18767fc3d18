"""The values that a model's parameters begin with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import nn

from instar.models.shape import Parameter


@torch.no_grad()
def set_parameters(model: nn.Module, table: Mapping[str, Parameter], seed: int) -> None:
    """Sets every parameter of the table.

    Its values depend on (seed, name, table) alone, not on the device, the order of construction or
    any other parameter. Norms start at one, biases and adapters' B at zero, the rest normal with
    the table's deviation.
    """
    for name, entry in table.items():
        tensor = model.get_parameter(name)
        if entry.std:
            values = torch.empty(entry.shape, dtype=torch.float32, device="cpu")
            values.normal_(0.0, entry.std, generator=named_generator(seed, name))
            tensor.copy_(values)
        else:
            gain = entry.kind == "norm" and name.endswith(".weight")
            tensor.fill_(1.0 if gain else 0.0)


def named_generator(*key: int | str) -> torch.Generator:
    """A CPU generator whose stream is a function of the key, such as (seed, parameter name)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
