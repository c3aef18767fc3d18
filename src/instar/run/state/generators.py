"""Global random generators of torch, NumPy and Python: save, restore and seed them.

Instar's own random numbers are a function of the seed and the position in the run. The global
generators are for models and tasks that draw from them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the generators' states, uint8 or int64 tensors, and their cached normal variates."""
    _, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
        "numpy_place": torch.tensor([legacy["state"]["pos"], legacy["has_gauss"]]),
        "numpy_gauss": torch.tensor([legacy["gauss"]], dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Restore the states that `generator_states` returned."""
    torch.set_rng_state(states["torch"])
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    place, has_gauss = states["numpy_place"].tolist()
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": states["numpy"].numpy().astype(np.uint32), "pos": place},
            "has_gauss": has_gauss,
            "gauss": states["numpy_gauss"].item(),
        }
    )
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


EVALUATION = int.from_bytes(b"evaluate", "little")
"""Replaces the step in `seed_generators`, so that every evaluation draws the same numbers."""


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Context manager that restores the generators' states at its end."""
    states = generator_states(device)
    try:
        yield
    finally:
        restore_generators(states, device)


def seed_generators(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the host's generators and that of `device` from a position in the run: the step, and a rank
    or sample number."""
    entropy = np.random.SeedSequence((seed, step, rank)).generate_state(3, np.uint64)
    # `torch.manual_seed` seeds all devices, and takes several times as long as the rest of this
    torch.default_generator.manual_seed(int(entropy[0] >> 1))
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(int(entropy[0] >> 1))
    random.seed(int(entropy[1]))
    np.random.seed(int(entropy[2] >> 32))
