"""Operations on experts: a dense model becomes a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from instar.growth.plan import Fresh, Grown, GrowthError, GrowthPlan, Stacked, TensorPlan
from instar.models.architecture import EXPERTS_PER_TOKEN, ROUTER_STD, Architecture
from instar.models.lora import adapter_of

BALANCE = 0.01
"""Default weight of the load-balancing loss (arXiv 2101.03961, section 2.2)."""


def upcycle(
    arch: Architecture, value: int, options: Mapping[str, Any], step: int
) -> tuple[Architecture, GrowthPlan]:
    """Replaces every MLP by `value` copies of it, its experts, and a router (sparse upcycling, arXiv 2212.05055).

    Exact whatever the router says, because experts are equal and gates add up to 1. The router is drawn: with zeros
    every token would choose the same experts, and the others would never train. Experts then diverge by the tokens
    that they get.

    `noise` adds normal noise to each expert, with this standard deviation relative to the root mean square of the
    tensor; lossy.

    Raises:
        GrowthError: there are experts already, or adapters of MLPs, which have no counterpart.
    """
    del step
    if arch.num_experts is not None:
        raise GrowthError(f"the model has {arch.num_experts} experts already")
    adapted = [name for name in arch.adaptable() if ".mlp." in name and adapter_of(arch.lora, name)]
    if adapted:
        raise GrowthError(
            f"{adapted[0]} has an adapter, and experts have none: merge_lora mlp and set_lora_rank "
            "{target: mlp, rank: 0} first"
        )
    per_token = options.get("num_experts_per_tok", min(EXPERTS_PER_TOKEN, value))
    grown = replace(
        arch,
        num_experts=value,
        num_experts_per_tok=per_token,
        router_aux_loss_coef=float(options.get("router_aux_loss_coef", BALANCE)),
    )
    noise = float(options.get("noise", 0.0))
    tensors: dict[str, TensorPlan] = {}
    for name, entry in grown.parameters().items():
        if name.endswith(".mlp.router.weight"):
            tensors[name] = Fresh(entry.shape, "normal", ROUTER_STD)
        elif entry.axes[0] == "experts":
            tensors[name] = Stacked(name, value, noise)
        else:
            tensors[name] = Grown(name)
    note = f"{value} experts, {per_token} per token"
    return grown, GrowthPlan(tensors, "lossy" if noise else "exact", notes=(note,))
