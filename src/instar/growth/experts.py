"""Operations on experts: a dense model becomes a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from instar.growth.plan import Fresh, Grown, GrowthError, GrowthPlan, Stacked, TensorPlan
from instar.models.architecture import EXPERTS_PER_TOKEN, ROUTER_STD, Architecture
from instar.models.hf.families import JOINED
from instar.models.hf.pretrained import PretrainedShape
from instar.models.lora import adapter_of
from instar.models.shape import TransformerShape

BALANCE = 0.01
"""Default weight of the load-balancing loss (arXiv 2101.03961, section 2.2)."""


def upcycle(
    arch: TransformerShape, value: int, options: Mapping[str, Any], step: int
) -> tuple[TransformerShape, GrowthPlan]:
    """Replace every MLP by `value` copies of it, its experts, and a router (sparse upcycling, arXiv 2212.05055).

    Exact whatever the router says, because experts are equal and gates add up to 1. The router is drawn: with zeros
    every token would choose the same experts, and the others would never train. Experts then diverge by the tokens
    that they get.

    `noise` adds normal noise to each expert, with this standard deviation relative to the root mean square of the
    tensor; lossy.

    Raises:
        ArchitectureError: more experts per token than experts; a family of transformers without experts.
        GrowthError: there are experts already, or adapters of MLPs, which have no counterpart; or no gradient would reach
            the router.
    """
    del step
    if "experts" in arch.sizes():
        raise GrowthError(f"the model has {arch.sizes()['experts']} experts already")
    per_token = options.get("num_experts_per_tok", min(EXPERTS_PER_TOKEN, value))
    if per_token > value:
        raise GrowthError(f"num_experts_per_tok: {per_token} of {value} experts; choose fewer")
    balance = float(options.get("router_aux_loss_coef", BALANCE))
    noise = float(options.get("noise", 0.0))
    if per_token == 1 and not (isinstance(arch, Architecture) and balance > 0.0):
        # the models of transformers add their load-balancing loss only where they are asked for it
        more = " and router_aux_loss_coef is 0" if isinstance(arch, Architecture) else ""
        raise GrowthError(
            f"num_experts_per_tok is 1{more}: the weight of a token's only expert is 1 whatever the router says, so no "
            "gradient would ever reach the router; choose num_experts_per_tok: 2 or more"
        )
    if isinstance(arch, Architecture):
        sparse: TransformerShape = _gpt(arch, value, per_token, balance)
    elif isinstance(arch, PretrainedShape):
        sparse = arch.with_experts(value, per_token, balance)
    else:
        raise GrowthError(f"a {type(arch).__name__} has no counterpart with experts")
    old = arch.parameters()
    tensors: dict[str, TensorPlan] = {}
    for name, entry in sparse.parameters().items():
        sources = _sources(name)
        if all(source in old for source in sources):
            same_rank = len(entry.shape) == len(old[sources[0]].shape)
            tensors[name] = Grown(name) if same_rank else Stacked(sources, value, per_token, noise)
        else:
            tensors[name] = Fresh(entry.shape, "normal", ROUTER_STD)
    note = f"{value} experts, {per_token} per token"
    return sparse, GrowthPlan(tensors, "lossy" if noise else "exact", notes=(note,))


def _gpt(arch: Architecture, number: int, per_token: int, balance: float) -> Architecture:
    names_with_adapters = [
        name for name in arch.adaptable() if ".mlp." in name and adapter_of(arch.lora, name)
    ]
    if names_with_adapters:
        raise GrowthError(
            f"{names_with_adapters[0]} has an adapter, and experts have none: merge_lora mlp and set_lora_rank "
            "{target: mlp, rank: 0} first"
        )
    return replace(
        arch, num_experts=number, num_experts_per_tok=per_token, router_aux_loss_coef=balance
    )


def _sources(name: str) -> tuple[str, ...]:
    """Return the dense parameters of which a parameter of the grown model is made."""
    for joined_suffix, sources in JOINED.items():
        if name.endswith(joined_suffix):
            return tuple(name.removesuffix(joined_suffix) + source for source in sources)
    return (name,)
