"""A model's graphs compiled before it is there, for torch's cache on the disk to have them.

Compiled are the graphs that training runs, forward and backward, of tensors that have a shape and no
memory: it takes a processor and neither the model's memory nor the device's time.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter

_NICE = 10


class Blank(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Blank:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def on(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Call:
    """What a model is called with; tensors are `Blank`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """All that decides which graphs a run compiles."""

    model: Module
    """on the meta device; parameters that do not train say so"""
    call: Call
    device: torch.device
    autocast: torch.dtype | None
    threads: int
    bucket_bytes: int | None
    """of DDP, which cuts graphs where a bucket is full; None: there is one rank"""
    namesake: str
    """see `namesake`"""


def namesake() -> str:
    """The module after which pickle names torch's constants, in the cache's keys too: the first
    that was imported of all that have `torch`. Only a process that agrees in it finds the graphs."""
    return str(pickle.whichmodule(torch.contiguous_format, "torch.contiguous_format"))  # type: ignore[attr-defined]


class _Called(Exception):  # noqa: N818
    """How a model was called; leaves the caller before it can ask for an answer."""


class _Listener(Module):
    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise _Called(args, kwargs)


def call_of(use: Callable[[Module], object]) -> Call:
    """How `use` calls the model that it is given."""
    try:
        use(_Listener())
    except _Called as called:
        args, kwargs = called.args
        return Call(
            tuple(_blank(each) for each in args), {n: _blank(each) for n, each in kwargs.items()}
        )
    raise ValueError("the model is not called")


def _blank(argument: object) -> object:
    return Blank.of(argument) if isinstance(argument, torch.Tensor) else argument


class Precompiled:
    """Made in a process of its own: making it is all that it is for."""

    def __init__(self, recipe: Recipe) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        os.nice(_NICE)
        torch.set_num_threads(recipe.threads)  # they stand in the kernels
        _import_first(recipe.namesake)
        device, call = recipe.device, recipe.call
        # what autocast keeps is of one mode of fake tensors, and compiling has another
        autocast = torch.autocast(
            device.type,
            recipe.autocast,
            enabled=recipe.autocast is not None,
            cache_enabled=False,
        )
        with FakeTensorMode(), autocast:
            _leave_meta(recipe.model, device)
            model = torch.compile(recipe.model, backend=_backend(recipe.bucket_bytes))
            model(
                *(_real(each, device) for each in call.args),
                **{name: _real(each, device) for name, each in call.kwargs.items()},
            )


def _real(argument: object, device: torch.device) -> object:
    return argument.on(device) if isinstance(argument, Blank) else argument


def _import_first(module: str) -> None:
    """Let a module be the first of `sys.modules`."""
    import_module(module)
    for name in [name for name in sys.modules if name != module]:
        sys.modules[name] = sys.modules.pop(name)


def _leave_meta(model: Module, device: torch.device) -> None:
    """Put a model's tensors on the device; unlike `to_empty`, leave shared ones shared."""
    made: dict[torch.Tensor, torch.Tensor] = {}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in made:
            empty = Blank.of(tensor).on(device)
            trains = tensor.requires_grad
            made[tensor] = Parameter(empty, trains) if isinstance(tensor, Parameter) else empty
        return made[tensor]

    for module in model.modules():
        tensors: Mapping[str, torch.Tensor | None]
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    setattr(module, name, moved(tensor))


def _backend(bucket_bytes: int | None) -> Any:
    """Inductor, which is not asked to run what it compiled."""
    import torch._functorch.config as autograd
    from torch._dynamo.backends.distributed import DDPOptimizer
    from torch._inductor.compile_fx import compile_fx

    def compile_both(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        # else the backward graph would wait until a backward pass asks for it
        with autograd.patch(force_non_lazy_backward_lowering=True):
            compile_fx(graph, inputs)
        return graph.forward

    if bucket_bytes is None:
        return compile_both
    return DDPOptimizer(bucket_bytes, compile_both).compile_fn
