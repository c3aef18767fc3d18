"""Growth on a schedule in other training loops: plain PyTorch, accelerate, transformers' `Trainer`, Lightning
(docs/growth-anywhere.md). Each library is imported by the name that needs it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instar.loops.lightning import LightningGrowth
    from instar.loops.schedule import GrowthSchedule, resume_across_growth
    from instar.loops.trainer import TrainerGrowth

__all__ = ["GrowthSchedule", "LightningGrowth", "TrainerGrowth", "resume_across_growth"]

_HOMES = {
    "GrowthSchedule": "schedule",
    "LightningGrowth": "lightning",
    "TrainerGrowth": "trainer",
    "resume_across_growth": "schedule",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'instar.loops' has no attribute {name!r}")
    return getattr(importlib.import_module(f"instar.loops.{_HOMES[name]}"), name)
