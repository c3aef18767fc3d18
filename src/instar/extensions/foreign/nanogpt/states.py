"""The states of nanoGPT's AdamW as those of our parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from instar.extensions.foreign.nanogpt.file import NanoCheckpoint
from instar.models.architecture import Architecture
from instar.models.hf.tensors import from_tensors, parts_of_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""Linear layers, which GPT-2 of transformers stores as (input, output)"""


class OtherOptimizer(Exception):  # noqa: N818
    """The states are not those of nanoGPT's optimizer; the message says in what."""


def as_gpt2(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of nanoGPT, weights or moments, in the layout of transformers' GPT-2."""
    return {n: t.T if n.endswith(_TRANSPOSED) and t.ndim == 2 else t for n, t in tensors.items()}


def optimizer_states(
    contents: NanoCheckpoint,
    shapes: Mapping[str, tuple[int, ...]],
    states: Mapping[str, Tensor],
    arch: Architecture,
) -> dict[str, Tensor]:
    """Return the states by `<parameter>/<state>`.

    Args:
        shapes: of the model's trained tensors by nanoGPT's names, in the order of its parameters.
        states: by `<number>/<state>`.

    Raises:
        OtherOptimizer: they are not those of AdamW for these parameters.
        CheckpointError: a moment is not finite, or has another shape than its parameter.
    """
    if any(group.amsgrad for group in contents.groups):
        raise OtherOptimizer("it is AdamW with amsgrad")
    names = _names_by_number(contents, shapes)
    by_kind: dict[str, dict[str, Tensor]] = {kind: {} for kind in (*MOMENTS, "step")}
    for key, tensor in states.items():
        number, _, kind = key.partition("/")
        name = names.get(int(number))
        if name is None or kind not in by_kind:
            raise OtherOptimizer(f"it has the state {key}")
        if kind != "step" and tuple(tensor.shape) != shapes[name]:
            raise OtherOptimizer(
                f"the state {key} would be that of {name}, {shapes[name]}, and is {tuple(tensor.shape)}"
            )
        by_kind[kind][name] = tensor
    if missing := [name for name in shapes if any(name not in kind for kind in by_kind.values())]:
        raise OtherOptimizer(f"{missing[0]} has no moments or no step")
    result: dict[str, Tensor] = {}
    for kind in MOMENTS:
        moments = from_tensors(arch, as_gpt2(by_kind[kind]), shaped_by="its parameter")
        result |= {f"{name}/{kind}": moment for name, moment in moments.items()}
    for name, parts in parts_of_tensors(arch).items():
        step = by_kind["step"][name].to(torch.float32).reshape(())
        result |= {f"{part}/step": step.clone() for part in parts}
    return result


def decays_tables(contents: NanoCheckpoint, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether the embeddings are decayed like the other matrices, as since March 2023, and if nothing says it."""
    if not contents.groups:
        return True
    return len(contents.groups[0].params) == sum(len(shape) > 1 for shape in shapes.values())


def _names_by_number(
    contents: NanoCheckpoint, shapes: Mapping[str, tuple[int, ...]]
) -> dict[int, str]:
    """Return the name of the parameter with each number.

    Since March 2023, the groups are all matrices and all vectors in the order of the model; before, the linear layers and
    the rest, embeddings included, each sorted by name.

    Raises:
        OtherOptimizer: the groups have other sizes.
    """
    numbers = [number for group in contents.groups for number in group.params]
    matrices = [name for name, shape in shapes.items() if len(shape) > 1]
    layers = sorted(name for name in matrices if not name.startswith("transformer.w"))
    vectors = [name for name in shapes if name not in matrices]
    sizes = [len(group.params) for group in contents.groups]
    for groups in ([matrices, vectors], [layers, sorted({*shapes} - {*layers})]):
        if [len(group) for group in groups] == sizes:
            return dict(zip(numbers, [*groups[0], *groups[1]], strict=True))
    raise OtherOptimizer(
        f"its groups have {', '.join(map(str, sizes))} of {len(shapes)} parameters"
    )
