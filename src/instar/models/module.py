"""Persistent buffers and training modes of any `nn.Module`, and what it must be to be trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from instar.checkpoint.tensor_file import DTYPES

SMALL_FLOPS = 1e9
"""A forward pass below this takes one core a few hundredths of a second."""


@contextmanager
def enough_threads(flops: float) -> Iterator[None]:
    """Context manager that computes with one thread if forward passes are small.

    Threads wait for each other after every operation. That costs little on an idle machine, but
    milliseconds where another process has the core, and a small pass has little to gain.

    Args:
        flops: of one forward pass.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if flops < SMALL_FLOPS else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@runtime_checkable
class ResetsBuffers(Protocol):
    """A model that computes its own buffers."""

    def reset_buffers(self) -> None:
        """Set all buffers to the values of a new model."""
        ...


def is_meta(model: Module) -> bool:
    """Return whether the model's parameters have no memory yet."""
    return any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are built have parameters without memory, and real buffers."""

    def to_meta(_: Module, __: str, parameter: Parameter | None) -> Any:
        # a parameter that is tied must stay the same object
        if parameter is None or parameter.is_meta:
            return parameter
        return Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()


def materialize(model: Module, device: torch.device, host: bool = False) -> None:
    """Give memory to a model on the meta device. Buffers are computed; parameters have any values.

    Args:
        host: parameters get host memory, whatever the device.
    """
    model.to_empty(device="cpu" if host else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    if isinstance(model, ResetsBuffers):
        model.reset_buffers()


def persistent_buffers(model: Module) -> dict[str, Tensor]:
    """Return the buffers of `state_dict()` by name, each tensor once.

    Do not cache the result: a forward pass may replace a buffer, or fill one that was None.
    """
    return {name: buffer for name, buffer in _registered_buffers(model) if buffer is not None}


def empty_buffers(model: Module) -> list[str]:
    """Return the names of persistent buffers that are None."""
    return [name for name, buffer in _registered_buffers(model) if buffer is None]


def has_buffers(model: Module) -> bool:
    """Return whether the model has persistent buffers, including those that are None."""
    return next(_registered_buffers(model), None) is not None


def _registered_buffers(model: Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield persistent buffers by name, each tensor once."""
    tensors: set[Tensor] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if name in module._non_persistent_buffers_set or buffer in tensors:
                continue
            if buffer is not None:
                tensors.add(buffer)
            yield f"{prefix}.{name}" if prefix else name, buffer


def model_tensors(model: Module) -> dict[str, Tensor]:
    """Return what a checkpoint saves: parameters and persistent buffers, each tensor once."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {**parameters, **persistent_buffers(model)}


def copy_buffers(model: Module) -> dict[str, Tensor | None]:
    """Return copies of all persistent buffers, including None, for `load_buffers`."""
    return {
        name: None if buffer is None else buffer.detach().clone()
        for name, buffer in _registered_buffers(model)
    }


@torch.no_grad()
def load_buffers(model: Module, tensors: Mapping[str, Tensor | None]) -> None:
    """Overwrite persistent buffers in place; one that is None or of another shape is replaced.

    Raises:
        AttributeError, KeyError: the model has no such module, or the module no such buffer.
    """
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        buffer = owner._buffers.get(last)
        if tensor is not None and buffer is not None and buffer.shape == tensor.shape:
            buffer.copy_(tensor)
        elif tensor is None:
            owner.register_buffer(last, None)
        else:
            device = next((p.device for p in model.parameters()), tensor.device)
            owner.register_buffer(last, tensor.to(device, copy=True))


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore all modes and buffers at the end.

    Submodules may have different modes: users keep some in evaluation mode while training.
    """
    was_training, modes = model.training, [(module, module.training) for module in model.modules()]
    buffers = copy_buffers(model)
    model.eval()
    try:
        yield
    finally:
        # by its own method first, which a subclass may override
        model.train(was_training)
        for module, mode in modes:
            module.training = mode
        load_buffers(model, buffers)


def check_trainable(model: Module) -> None:
    """Check that a module can be trained, and that a checkpoint can hold its state.

    Raises:
        ValueError: it cannot; names the part and what to write instead.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no size yet; give lazy modules their sizes, as in nn.Linear(in, out)"
            )
    for name, module in model.named_modules():
        if type(module).get_extra_state is not Module.get_extra_state:
            raise ValueError(
                f"{name or 'the module'} has get_extra_state(), which no checkpoint here holds; "
                "keep such a state in a buffer (register_buffer)"
            )
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(
                f"the parameter {name} is of type {parameter.dtype}; keep integers in a buffer, and "
                "a complex number as two real ones (torch.view_as_complex)"
            )
    _check_memory(dict(model.named_parameters()))
    for name, buffer in persistent_buffers(model).items():
        if buffer.layout != torch.strided or buffer.dtype not in DTYPES.values():
            raise ValueError(
                f"the buffer {name}, of type {buffer.dtype} and layout {buffer.layout}, cannot be "
                "saved; register it with persistent=False, or as dense tensors of another type"
            )
    if next(model.parameters(), None) is None:
        raise ValueError("the module has no parameters to train")


def check_shardable(model: Module) -> None:
    """Check that `fully_shard` takes all parameters of a module.

    Raises:
        ValueError: it does not; names the parameter and what to write instead.
    """
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            problem, instead = "has no dimension to shard", "give it the shape (1,)"
        elif not parameter.numel():
            problem, instead = f"is empty, {list(parameter.shape)}", "leave it out"
        elif not parameter.is_contiguous():
            problem = f"is not contiguous (shape {list(parameter.shape)}, strides {list(parameter.stride())})"
            instead = (
                "leave out channels_last, or make it of a .contiguous() tensor"
                if parameter.ndim > 2
                else "make it of a .contiguous() tensor"
            )
        else:
            continue
        raise ValueError(
            f"the parameter {name} {problem}, and sharded models cannot have such a one: {instead}, or set "
            "parallel.strategy: ddp"
        )


def _check_memory(parameters: Mapping[str, Tensor]) -> None:
    """Raise ValueError if an element of a parameter is also another, of it or of another parameter."""
    spans = []
    for name, parameter in parameters.items():
        if parameter.is_meta or not parameter.numel():
            continue
        if any(
            not stride and n > 1
            for n, stride in zip(parameter.shape, parameter.stride(), strict=True)
        ):
            raise ValueError(
                f"several elements of the parameter {name} are one place in memory, as of an expanded tensor; make it "
                "of a .contiguous() one"
            )
        last = sum(
            (n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride(), strict=True)
        )
        begin = parameter.data_ptr()
        spans.append((begin, begin + (last + 1) * parameter.itemsize, name))
    open_spans: list[tuple[int, str]] = []
    for begin, end, name in sorted(spans):
        open_spans = [(other_end, other) for other_end, other in open_spans if other_end > begin]
        for _, other in open_spans:
            if _share_elements(parameters[name], parameters[other]):
                raise ValueError(
                    f"{other} and {name} are two parameters in the same memory, so that an update of one changes both; "
                    "to tie them, assign one Parameter to both names, or else make one of a .clone()"
                )
        open_spans.append((end, name))


def _share_elements(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors with overlapping spans have an element in common: columns of one matrix have none."""

    def places(tensor: Tensor) -> Tensor:
        at = torch.tensor(tensor.data_ptr())
        for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
            at = at.unsqueeze(-1) + torch.arange(n) * stride * tensor.itemsize
        return at.flatten()

    return bool(torch.isin(places(first), places(second)).any()) or first.dtype != second.dtype
