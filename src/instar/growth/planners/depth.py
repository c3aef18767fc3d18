"""Operations that add whole modules: blocks between others, stacked copies of all blocks, experts in place of MLPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from instar.growth.axes import Use, initial_slices, with_mask
from instar.growth.plan import (
    Averaged,
    Fresh,
    Grown,
    GrowthError,
    GrowthPlan,
    Label,
    Stacked,
    TensorPlan,
)
from instar.growth.planners.lora import adapters_of_blocks
from instar.growth.values import format_list, grown_size, without_x
from instar.models.architecture import EXPERTS_PER_TOKEN, ROUTER_STD, Architecture
from instar.models.hf.families import JOINED
from instar.models.hf.pretrained import LoraShape, PretrainedShape
from instar.models.lora import adapter_of
from instar.models.shape import (
    Growable,
    Parameter,
    TransformerShape,
    in_block,
    layer_of,
    streams_of,
)

G = TypeVar("G", bound=Growable)

_NO_LAYER = "the model has no layer yet that could be copied; {}"

BALANCE = 0.01
"""Default weight of the load-balancing loss (arXiv 2101.03961, section 2.2)."""


@dataclass(frozen=True)
class _Block:
    """A block of the grown model, and the old block that it is or is made from."""

    source: int
    is_inserted: bool = False
    share: float = 0.0
    """of the old block above `source`, in a mean of both"""


def stack_layers(
    arch: G, value: Any, options: Mapping[str, Any], _step: int
) -> tuple[G, GrowthPlan]:
    """Make a deeper model of copies of the blocks; lossy.

    A list names the old block of each new one. A factor stacks copies of the whole model (G_stack, arXiv
    2405.15319); with `how`: ``interleave`` repeats each block in place, ``overlap`` stacks copies that lack `drop` blocks
    on each side of a seam (SOLAR, arXiv 2312.15166; default: a quarter), ``interpolate`` puts means of neighbours
    between them.
    """
    layers, value = _layers(arch), without_x(value)
    if not layers:
        raise GrowthError(_NO_LAYER.format("use insert_layers with from: normal"))
    # before the blocks are listed
    grown_size(len(value) if isinstance(value, list | tuple) else value * layers, layers, "layers")
    blocks = _stack_blocks(value, layers, options)
    grown_size(len(blocks), layers, "layers")
    order = [block.source for block in blocks]
    if unknown_layers := [layer for layer in order if layer >= layers]:
        raise GrowthError(f"there is no layer {unknown_layers[0]}: layers are 0 to {layers - 1}")
    if missing := sorted(set(range(layers)) - set(order)):
        raise GrowthError(
            f"layer {format_list(missing)} would be lost: the map must have every layer"
        )
    deeper = _deeper(arch, blocks, "neighbour")
    tensors = _tensors(deeper, blocks, (), "neighbour", arch.parameters())
    return deeper, GrowthPlan(tensors, "lossy", blocks=tuple(order))


def insert_layers(
    arch: G, value: int, options: Mapping[str, Any], step: int
) -> tuple[G, GrowthPlan]:
    """Insert `value` blocks between the others.

    `from`: ``neighbour`` is a copy of the block below that writes zeros to the residual stream (LLaMA Pro, arXiv
    2401.02415), ``normal`` is drawn, and writes zeros too; both are exact. ``copy`` is the whole copy; ``average`` the
    mean of the blocks below and above, weighted by the distance to each, or a copy where there is only one (LESA, arXiv
    2502.13794, learns such blocks of both). They are lossy. A mask makes all exact: it is the zero factor, and opens over some
    steps.
    """
    layers = _layers(arch)
    grown_size(max(layers, 1) + value, max(layers, 1), "layers")
    origin, steps = options.get("from", "neighbour"), options.get("mask")
    if not layers and origin != "normal":
        raise GrowthError(_NO_LAYER.format("choose from: normal"))
    zeros = steps is None and origin in ("neighbour", "normal")
    streams = streams_of(arch) if zeros else ()
    if zeros and not streams:
        raise GrowthError(
            "the model names no stream that its blocks add to, so a new block cannot leave the "
            "others' values as they are: give it `streams`, or choose from: copy or stack_layers"
        )
    positions = _positions(options.get("where", "end"), value, layers)
    blocks: list[_Block] = []
    for layer in range(layers + 1):
        count = positions.count(layer)
        means = origin == "average" and 0 < layer < layers
        shares = (part / (count + 1) if means else 0.0 for part in range(1, count + 1))
        blocks += [_Block(max(layer - 1, 0), is_inserted=True, share=share) for share in shares]
        blocks += [_Block(layer)] if layer < layers else []
    deeper = _deeper(arch, blocks, origin)
    new = [at for at, block in enumerate(blocks) if block.is_inserted]
    if steps is not None:
        deeper = with_mask(deeper, "layers", _ranges(new), step, steps)
    tensors = _tensors(deeper, blocks, streams, origin, arch.parameters())
    is_random = origin == "normal"
    sources = tuple(None if block.is_inserted and is_random else block.source for block in blocks)
    label: Label = "exact" if zeros or steps is not None else "lossy"
    return deeper, GrowthPlan(tensors, label, notes=(f"new: {format_list(new)}",), blocks=sources)


def upcycle(
    arch: TransformerShape, value: int, options: Mapping[str, Any], _step: int
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


def _stack_blocks(value: Any, layers: int, options: Mapping[str, Any]) -> list[_Block]:
    if isinstance(value, list | tuple):
        if options.keys() & {"how", "drop"}:
            raise GrowthError("a layer map says itself where copies are: leave out how and drop")
        return [_Block(layer) for layer in value]
    how, drop = options.get("how", "stack"), options.get("drop", max(1, layers // 4))
    if "drop" in options and how != "overlap":
        raise GrowthError("drop requires how: overlap")
    if how == "interleave":
        return [_Block(layer) for layer in range(layers) for _ in range(value)]
    if how == "interpolate":
        return [
            _Block(layer, share=part / value if layer + 1 < layers else 0.0)
            for layer in range(layers)
            for part in range(value)
        ]
    if how == "overlap" and 2 * drop > layers:
        raise GrowthError(
            f"drop: {drop} on both sides of a seam would lose blocks of {layers}; choose at most {layers // 2}"
        )
    cut = drop if how == "overlap" else 0
    return [
        _Block(layer)
        for copy in range(value)
        for layer in range(cut if copy else 0, layers - (cut if copy + 1 < value else 0))
    ]


def _layers(arch: Growable) -> int:
    sizes = arch.sizes()
    if "layers" not in sizes:
        raise GrowthError("this model has no axis called layers, so blocks cannot be added")
    return sizes["layers"]


def _positions(where: Any, count: int, layers: int) -> list[int]:
    """Return the old layers before which the new ones are inserted; `layers` is the end."""
    if where == "even":
        return [(number + 1) * layers // count for number in range(count)]
    if isinstance(where, str):
        return [layers if where == "end" else 0] * count
    if len(where) != count:
        raise GrowthError(f"{len(where)} positions for {count} new layers; give one for each")
    if max(where) > layers:
        raise GrowthError(
            f"no layer can come before layer {max(where)}; positions are 0 to {layers}"
        )
    return list(where)


def _deeper(arch: Any, blocks: Sequence[_Block], origin: str) -> Any:
    """Return the architecture with these blocks; adapters move with their blocks."""
    if not isinstance(arch, TransformerShape):
        return arch.resized(layers=len(blocks))
    is_random = origin == "normal"
    sources = [None if block.is_inserted and is_random else block.source for block in blocks]
    if isinstance(arch, Architecture | LoraShape) and arch.lora:
        deeper = replace(arch, lora=()).deeper(sources)
        return replace(deeper, lora=adapters_of_blocks(arch, sources))
    return arch.deeper(sources)


def _tensors(
    larger: Growable,
    blocks: Sequence[_Block],
    streams: tuple[str, ...],
    origin: str,
    old: Mapping[str, Parameter],
) -> dict[str, TensorPlan]:
    """Return all plans; the first mention of an old block keeps it, further ones copy it."""
    named_first = {
        block.source: at
        for at, block in reversed([*enumerate(blocks)])
        if not (block.is_inserted or block.share)
    }
    firsts = set(named_first.values())
    tensors: dict[str, TensorPlan] = {}
    for name, entry in larger.parameters().items():
        layer, source = layer_of(name), _in_old(name, blocks)
        if layer is None or layer in firsts:
            tensors[name] = Grown(source)
        elif blocks[layer].is_inserted and entry.writes in streams:
            tensors[name] = Fresh(entry.shape, "zero", offset=entry.offset)
        elif blocks[layer].is_inserted and origin == "normal":
            tensors[name] = _fresh(name, entry)
        elif (share := blocks[layer].share) and (
            (above := _above(source)) in old and old[above].shape == entry.shape
        ):
            tensors[name] = Averaged((source, above), (1 - share, share))
        else:
            tensors[name] = Grown(source, is_copy=True)
    return tensors


def _fresh(name: str, entry: Parameter) -> Fresh:
    new = initial_slices(Use(name, entry, 0), entry.shape[0])
    return Fresh(entry.shape, new.fill, new.std, entry.offset)


def _above(name: str) -> str:
    """Return the name of the same tensor in the next block."""
    layer = layer_of(name)
    return name if layer is None else in_block(name, layer + 1)


def _in_old(name: str, blocks: Sequence[_Block]) -> str:
    """Return the old model's name of the tensor that a new tensor is made from."""
    layer = layer_of(name)
    return name if layer is None else in_block(name, blocks[layer].source)


def _ranges(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive indices as (start, stop)."""
    runs = groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0])
    return [(run[0], run[-1] + 1) for run in ([index for _, index in g] for _, g in runs)]


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
