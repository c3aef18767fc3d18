"""States of every dtype that drift, and chains of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from instar.checkpoint.delta.chain import append

State = dict[str, Tensor]


def first() -> State:
    chance = torch.Generator().manual_seed(0)
    return {
        "embedding": torch.randn(64, 16, generator=chance).bfloat16(),
        "layer.0.weight": torch.randn(16, 16, generator=chance),
        "layer.0.half": torch.randn(40, generator=chance).half(),
        "scale": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        "steps": torch.arange(7),
        "mask": torch.tensor([True, False, True]),
        "eight": torch.randn(9, generator=chance).to(torch.float8_e4m3fn),
    }


def after(state: State, step: int) -> State:
    """A state with a few changed bits in most tensors."""
    chance = torch.Generator().manual_seed(step)
    new = {name: tensor.clone() for name, tensor in state.items()}
    for name, tensor in new.items():
        if name != "mask" and tensor.numel():
            bits = tensor.view(-1).view(torch.uint8)
            at = torch.randint(bits.numel(), (1 + bits.numel() // 50,), generator=chance)
            bits[at] ^= 1
    return new


def save(folder: Path, count: int) -> list[State]:
    states = [first()]
    append(folder, 0, states[0], None)
    for step in range(1, count):
        states.append(after(states[-1], step))
        append(folder, 10 * step, states[-1], states[-2], anchor=step == 5)
    return states


def same(a: State, b: State) -> bool:
    """Whether two states have equal bits."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and torch.equal(
            a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)
        )
        for name in a
    )
