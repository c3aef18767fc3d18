"""What a torch `DataLoader` that a user's function returns says of its samples: their data set, batch size and weights.

Torch is not imported: without it, nobody has a loader.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

_SAMPLERS = {"RandomSampler", "SequentialSampler", "_InfiniteConstantSampler"}
_SAMPLERS |= {"BatchSampler", "NoneType"}
"""Samplers that `data.order` replaces."""
_WEIGHTED = "WeightedRandomSampler"


def is_loader(value: object) -> TypeGuard[Any]:
    """Return whether a value is a torch `DataLoader`."""
    torch = sys.modules.get("torch.utils.data")
    return torch is not None and isinstance(value, torch.DataLoader)


def loader_batch(value: object) -> int | None:
    """Return the batch size of a torch `DataLoader`, that of the training samples if it is one of
    several; None for anything else."""
    train = value.get("train") if isinstance(value, Mapping) else value
    return train.batch_size if is_loader(train) else None


def loader_weights(value: object) -> NDArray[np.float64] | None:
    """Return the weights by which a `DataLoader` draws its samples, [samples]; None: it has none, or is no loader."""
    if not is_loader(value) or type(value.sampler).__name__ != _WEIGHTED:
        return None
    return np.asarray(value.sampler.weights, dtype=np.float64)


def check_loader(loader: Any) -> None:
    """Raise ValueError if a `DataLoader` collates or orders samples in a way that a run would not."""
    collate = getattr(loader.collate_fn, "__module__", "")
    if not collate.startswith(("torch.", "torch_geometric.")):
        raise ValueError(
            "a DataLoader with a collate_fn, which would not be called; return its data set, "
            "and define collate(self, samples) in the task"
        )
    samplers = {type(loader.sampler).__name__, type(loader.batch_sampler).__name__}
    if names := ", ".join(sorted(samplers - _SAMPLERS - {_WEIGHTED})):
        raise ValueError(
            f"a DataLoader with a {names}, which would not be used; return its data set: the "
            "order of samples is data.order"
        )
    if "RandomSampler" in samplers and loader.sampler.replacement:
        raise ValueError(
            "a DataLoader that draws with replacement; return its data set, and say data.order: random"
        )
    if _WEIGHTED in samplers:
        _check_weighted(loader.sampler, len(loader.dataset))


def _check_weighted(sampler: Any, samples: int) -> None:
    """Raise ValueError if a sampler does not draw as many samples with replacement as there are."""
    if not sampler.replacement:
        raise ValueError(
            f"a {_WEIGHTED} with replacement=False, whose later draws depend on all earlier ones; say "
            "replacement=True, or data.balance to draw classes equally often"
        )
    if len(sampler.weights) != samples:
        raise ValueError(
            f"a {_WEIGHTED} with {len(sampler.weights):,} weights, and {samples:,} samples; give one for each"
        )
    if sampler.num_samples != samples:
        raise ValueError(
            f"a {_WEIGHTED} with num_samples={sampler.num_samples}, but an epoch has as many draws as there are "
            f"samples, {samples}: say num_samples={samples}, and train.until for another length"
        )
