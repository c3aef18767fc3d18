"""Batch and context that change together with tokens per step or with the learning rate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from instar.config.document import value_text
from instar.schedule.settings import Settings

CONTEXT = frozenset({"set_context", "change_context"})
"""Operations that change the length of samples: a stream restarts from its beginning."""
_BATCH = frozenset({"set_batch_size", "change_batch_size", "set_grad_accum", "change_grad_accum"})

LR_RULES: Mapping[str, Callable[[float], float]] = {
    "keep": lambda _: 1.0,
    "sqrt": math.sqrt,
    "linear": lambda ratio: ratio,
}
"""The factor of the learning rate for a factor of the global batch: the square root for Adam
(Malladi et al. 2022, arXiv 2205.10287), linear for SGD (Goyal et al. 2017, arXiv 1706.02677)."""


def refused_options(name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each option that an operation on settings does not have, or whose value is invalid, with
    the message."""
    choices: dict[str, tuple[str, ...]] = {}
    if name in CONTEXT:
        choices = {"tokens": ("change", "keep")}
    elif name in _BATCH:
        choices = {"lr": tuple(LR_RULES)}
    for option, value in options.items():
        if option not in choices:
            has = f"whose option is {', '.join(choices)}" if choices else "which has none"
            yield option, f"is not an option of {name}, {has}"
        elif not (isinstance(value, str) and value in choices[option]):
            *allowed_before, last = choices[option]
            yield option, f"must be {', '.join(allowed_before)} or {last}, got {value_text(value)}"


def with_options(before: Settings, after: Settings, options: Mapping[str, Any]) -> Settings:
    """Return the settings after an operation and its options.

    Raises:
        ValueError: the tokens per step cannot be kept.
    """
    if options.get("tokens") == "keep":
        after = _same_tokens(before, after)
    ratio = after.global_batch / before.global_batch
    factor = LR_RULES[options["lr"]](ratio) if "lr" in options else 1.0
    return after if factor == 1.0 else dataclasses.replace(after, lr=after.lr * factor)


def _same_tokens(before: Settings, after: Settings) -> Settings:
    """Change the batch size inversely to the context."""
    tokens = before.batch_size * before.context
    batch_size, remainder = divmod(tokens, after.context)
    if remainder or not batch_size:
        multiple = after.context // math.gcd(after.context, before.context)
        raise ValueError(
            f"a batch of {before.batch_size} samples of {before.context} tokens cannot have as many "
            f"tokens with samples of {after.context}: make the batch size then a multiple of {multiple}, "
            "or choose another context"
        )
    return dataclasses.replace(after, batch_size=batch_size)
