"""The parameters of a model as safetensors, named by their hash."""

from __future__ import annotations

from typing import Any

import xxhash

INITIAL = "initial"
"""the weights of a server to which none were sent"""


class Unfit(ValueError):  # noqa: N818
    """Weights are not those of this model."""


def get_weights(model: Any, dtype: str) -> bytes:
    """Return all parameters, converted to a dtype."""
    import torch
    from safetensors.torch import save

    kind = getattr(torch, dtype)
    return save(
        {name: p.detach().to("cpu", kind).contiguous() for name, p in model.named_parameters()}
    )


def put_weights(model: Any, content: bytes) -> str:
    """Set all parameters, or none; return the name of the weights.

    Raises:
        Unfit: a name, shape or dtype differs, or a value is not finite.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
    except SafetensorError as error:
        raise Unfit(f"not safetensors: {error}") from error
    parameters = dict(model.named_parameters())
    if different := sorted(parameters.keys() ^ tensors.keys()):
        raise Unfit(f"{different[0]} is {'missing' if different[0] in parameters else 'unknown'}")
    for name, parameter in parameters.items():
        if (form := _form(tensors[name])) != _form(parameter):
            raise Unfit(f"{name} is {form}, not {_form(parameter)}")
        if not torch.isfinite(tensors[name]).all():
            raise Unfit(f"{name} has values that are not finite")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    return name_of_weights(content)


def name_of_weights(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def size_bytes(model: Any) -> int:
    """Return the size of all parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _form(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
