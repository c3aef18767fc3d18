"""States of every dtype that drift, and chains of them."""

from __future__ import annotations

import itertools
import json
import os
import resource
from pathlib import Path

import torch
from torch import Tensor

from instar.checkpoint.manifest import CheckpointError
from instar.extensions.delta.chain import append, links, load_state, verify_chain

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


SIZE = 1 << 16
"""elements of the weights that a child saves"""


def weights(step: int, size: int = SIZE) -> State:
    """Weights that say of which step they are; few differ from those of the step before."""
    tensor = torch.ones(size, dtype=torch.bfloat16)
    tensor.view(torch.int16)[step % 97 :: 97] += step
    return {"weight": tensor, "step": torch.tensor(step)}


def save_for_ever(folder: str, log_path: str) -> None:
    """Resume a chain and save step after step; each goes into the file `log_path` once saved.

    Every second process takes up the last state; the others begin with an anchor.
    """
    chain = Path(folder)
    with Path(log_path).open("ab", buffering=0) as file:
        last = links(chain)[-1].step
        base = load_state(chain) if os.getpid() % 2 else None
        for step in itertools.count(last + 1):
            state = weights(step)
            append(chain, step, state, base)
            base = state
            file.write(b"%d\n" % step)


def save_with_too_little_room(folder: str, room_bytes: int) -> int:
    """Save a link where no file may grow beyond `room_bytes`, then again without the limit.

    Prints the error as JSON.
    """
    chain = Path(folder)
    step = links(chain)[-1].step
    message = ""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = load_state(chain)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        append(chain, step + 1, weights(step + 1), before)
    except CheckpointError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    after_it = [link.step for link in verify_chain(chain)]
    if message:
        append(chain, step + 1, weights(step + 1), before)
    print(json.dumps({"told": message, "last": after_it[-1], "then": verify_chain(chain)[-1].step}))
    return 0
