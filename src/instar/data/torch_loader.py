"""What a torch `DataLoader` that a user's function returns says of its samples: their data set, batch size and weights.

Torch is not imported: without it, nobody has a loader.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from instar.config.origins import in_yaml
from instar.config.schema import RunConfig

_SAMPLERS = {"RandomSampler", "SequentialSampler", "_InfiniteConstantSampler"}
_SAMPLERS |= {"BatchSampler", "NoneType"}
"""Samplers that `data.order` replaces."""
_WEIGHTED = "WeightedRandomSampler"


def is_loader(value: object) -> TypeGuard[Any]:
    """Return whether a value is a torch `DataLoader`."""
    torch = sys.modules.get("torch.utils.data")
    return torch is not None and isinstance(value, torch.DataLoader)


def unused_settings(value: object, config: RunConfig) -> list[str]:
    """Return which settings of a torch `DataLoader` the run does not follow, in words: of that of the training samples if
    it is one of several; of anything else, none."""
    loader = value.get("train") if isinstance(value, Mapping) else value
    if not is_loader(loader):
        return []
    data, sampler = config.data, type(loader.sampler).__name__
    rows: list[tuple[str, object, str, object]] = []
    if loader.batch_size is not None:
        rows.append(("train.batch_size", config.train.batch_size, "batch_size", loader.batch_size))
    if loader.drop_last:  # the default leaves nothing out, as the run's does
        rows.append(("data.drop_last", data.drop_last, "drop_last", True))
    if loader.num_workers:
        rows.append(("data.workers", data.workers, "num_workers", loader.num_workers))
    unused = [
        f"{key} {in_yaml(ours)} is used, not the {name} {theirs} of the DataLoader"
        for key, ours, name, theirs in rows
        if ours != theirs
    ]
    shuffles, is_shuffled = sampler == "RandomSampler", data.order != "sequential"
    if sampler in ("RandomSampler", "SequentialSampler") and shuffles != is_shuffled:
        text = f"data.order {data.order} is used, not the shuffle={shuffles} of the DataLoader"
        unused.append(text)
    if loader.generator is not None:
        unused.append("the run's seed is used, not the generator of the DataLoader")
    return unused


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
    if "RandomSampler" in samplers and loader.sampler.num_samples != len(loader.dataset):
        raise ValueError(
            f"a DataLoader that draws {loader.sampler.num_samples:,} of {len(loader.dataset):,} samples an epoch, where "
            "all would be used; return a Subset of its data set, or set data.train_subset"
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
