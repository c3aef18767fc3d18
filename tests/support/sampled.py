"""A task with a rare class and weights of samples, and a transform that draws."""

from __future__ import annotations

from typing import Any

import numpy as np
from science import Halves

from instar.data.columns import Columns


def noise(sample: Any, generator: Any) -> Any:
    return {"number": sample["number"], "noise": generator.random()}


def jitter(sample: Any, generator: Any) -> Any:
    """Every draw lies elsewhere."""
    return {**sample, "x": sample["x"] + generator.normal(size=2).astype("f4") / 8}


class Rare(Halves):
    """One of eight samples is of side 1, and is drawn seven times as often."""

    def samples(self) -> Columns:
        columns = super().samples()
        side = (np.arange(self.data.samples) % 8 == 5).astype(np.int64)
        return {**columns, "side": side, "weight": 1.0 + 6 * side}
