"""Operations on weights that a model uses several times: the table of tokens, which is the head too, and blocks that
run several times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from instar.growth.plan import Grown, GrowthError, GrowthPlan, Merged, TensorPlan
from instar.growth.planners.lora import adapters_in, adapters_of_blocks
from instar.models.architecture import Architecture
from instar.models.hf.pretrained import PretrainedShape
from instar.models.lora import adapter_of, cover_weights
from instar.models.shape import (
    Growable,
    Loop,
    TransformerShape,
    in_block,
    layer_of,
    passes_of,
)

T = TypeVar("T", bound=TransformerShape)


def untie_embeddings(
    arch: T, _value: Any, _options: Mapping[str, Any], _step: int
) -> tuple[T, GrowthPlan]:
    """Give the head a table of its own, a copy of that of the tokens, with its optimizer state; exact.

    An adapter of the table stays the table's; the head begins with it merged. From then on each has the gradient of
    its own use, so they part at the next step.
    """
    if not arch.tied:
        raise GrowthError("the head has a table of its own already")
    untied = _untied(arch)
    table = _only(arch, "embedding", "vocab")
    head = _only(untied, "head", "vocab")
    tensors: dict[str, TensorPlan] = {name: Grown(name) for name in untied.parameters()}
    adapter = adapter_of(getattr(arch, "lora", ()), weight := table.removesuffix(".weight"))
    if adapter is None:
        tensors[head] = Grown(table, is_second=True)
    else:
        a, b = (f"{weight}.lora_{part}" for part in "ab")
        tensors[head] = Merged(table, a, b, adapter.scale, is_second=True)
    return untied, GrowthPlan(tensors, "exact", notes=(f"{head} from {table}",))


def loop_layers(
    arch: Architecture, value: Mapping[str, Any], _options: Mapping[str, Any], _step: int
) -> tuple[Architecture, GrowthPlan]:
    """Run a range of blocks several times, one after the other and then again, with the same weights; lossy."""
    if arch.loop is not None:
        loop = arch.loop
        raise GrowthError(f"layers {loop.first} to {loop.last} are looped already: unloop first")
    looped = replace(arch, loop=Loop(value["from"], value["to"], value["times"]))
    return looped, GrowthPlan({name: Grown(name) for name in arch.parameters()}, "lossy")


def unloop(
    arch: Architecture, _value: Any, _options: Mapping[str, Any], _step: int
) -> tuple[Architecture, GrowthPlan]:
    """Make every pass through a looped block a block of its own, with the weights and the optimizer states of that;
    exact."""
    if arch.loop is None:
        raise GrowthError("no layers are looped")
    sources = passes_of(arch)
    lora = adapters_of_blocks(arch, sources)
    deeper = replace(arch.deeper(sources), loop=None, lora=lora)
    tensors: dict[str, TensorPlan] = {}
    for name in deeper.parameters():
        layer = layer_of(name)
        if layer is None:
            tensors[name] = Grown(name)
        else:
            source = sources[layer]
            tensors[name] = Grown(in_block(name, source), is_second=source in sources[:layer])
    return deeper, GrowthPlan(tensors, "exact", blocks=sources)


def _untied(arch: Any) -> Any:
    if isinstance(arch, PretrainedShape):
        return replace(arch, config={**arch.config, "tie_word_embeddings": False})
    if not isinstance(arch, Architecture):
        raise GrowthError("this model's shape does not say how to untie its head")
    # a target such as `all` names the head too, which has no adapter
    adapters = {**adapters_in(arch), "head": None}
    untied = replace(arch, tied=False, lora=())
    return replace(untied, lora=cover_weights(adapters, [entry.target for entry in arch.lora]))


def _only(arch: Growable, kind: str, axis: str) -> str:
    """Return the only weight of a kind that has an axis; adapters aside."""
    (name,) = (
        name
        for name, entry in arch.parameters().items()
        if entry.kind == kind and entry.axes[:1] == (axis,) and name.endswith(".weight")
    )
    return name
