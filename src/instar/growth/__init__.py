"""How a model changes: plans over named tensors, made from axes and applied to values.

`grow` grows a model of anyone's loop in place, `plan_growth` returns a plan as data (docs/growth-anywhere.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instar.config.sections import Operation
    from instar.growth.live.grow import PreparedGrowth, grow, plan_growth, prepare
    from instar.growth.plan import GrowthError

__all__ = ["GrowthError", "Operation", "PreparedGrowth", "grow", "plan_growth", "prepare"]

_HOMES = {"Operation": "instar.config.sections", "GrowthError": "instar.growth.plan"}


def __getattr__(name: str) -> Any:
    """Import torch only when a function that needs it is used."""
    if name not in __all__:
        raise AttributeError(f"module 'instar.growth' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "instar.growth.live.grow")), name)
