"""More rows in the tables: tokens and positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from instar.growth.axes import born, laid_out, relaid
from instar.growth.plan import GrowthPlan, New, Old
from instar.growth.values import grown_size
from instar.models.architecture import Architecture


def resize_vocab(
    arch: Architecture, value: Any, options: Mapping[str, Any], step: int
) -> tuple[Architecture, GrowthPlan]:
    """More tokens, each the mean of the old ones, in the table and in the head; bounded.

    A new logit is the mean of the V old ones, and its exponential at most the mean of theirs: n new
    ones raise the loss by at most log(1 + n / V).
    """
    del options, step
    now = arch.vocab_size
    size = grown_size(value, now, "vocab")
    grown = arch.resized(vocab=size)
    layout = laid_out([Old(0, now), size - now], lambda _, count: New(count, "mean"))
    tensors = relaid(arch, grown, {"vocab": layout})
    return grown, GrowthPlan(tensors, "bounded", bound_nats=math.log1p((size - now) / now))


def extend_context(
    arch: Architecture, value: Any, options: Mapping[str, Any], step: int
) -> tuple[Architecture, GrowthPlan]:
    """More positions that the model can look back on; exact for as many tokens as before. RoPE has
    no table of them; a learned one gets rows as it had them at first."""
    del options, step
    now = arch.context
    size = grown_size(value, now, "context")
    grown = arch.resized(context=size)
    layout = laid_out([Old(0, now), size - now], born)
    return grown, GrowthPlan(relaid(arch, grown, {"context": layout}), "exact")
