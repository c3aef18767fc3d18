"""Wrappers around a live model."""

from __future__ import annotations

from collections.abc import Iterator

from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel


def wrappers(model: Module) -> Iterator[Module]:
    """Yields a model and what it wraps, from the outside in: `torch.compile`, DDP, moving averages; the last is the
    module itself."""
    while True:
        yield model
        if isinstance(model, DistributedDataParallel | DataParallel | AveragedModel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), Module):
            model = inner
        else:
            return


def bare(model: Module) -> Module:
    """Returns the module inside all wrappers."""
    *_, module = wrappers(model)
    return module
