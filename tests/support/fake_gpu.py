"""A CUDA device without CUDA: tensors that say `cuda:0`, hold their values on the CPU, and cannot be mixed with others.

In `device()`, `torch.cuda` answers as if there were a GPU, on every thread, so that runs take the branches for GPUs.
Kernels, memory and order are the CPU's: neither speed nor rounding nor races are those of a GPU.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from instar.cli.main import main
from instar.record import device as record_device

MEMORY_BYTES = 24 << 30
DEVICES = 2


class Transfer(NamedTuple):
    """A copy between host and device."""

    to: str
    thread: str
    is_pinned: bool
    waits: bool


@dataclass
class Gpu:
    """What was asked of the device."""

    index: int = 0
    transfers: list[Transfer] = field(default_factory=list)
    pinned_by: Counter[str] = field(default_factory=Counter)
    """how many tensors each thread has pinned"""
    calls: Counter[str] = field(default_factory=Counter)
    """of the functions of `torch.cuda`, by name"""
    random: torch.Generator = field(default_factory=torch.Generator)
    _pins: list[Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def pin(self, tensor: Tensor) -> Tensor:
        """Return the tensor, noted as pinned."""
        self.pinned_by[threading.current_thread().name] += 1
        self._pins.append(tensor)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether it is, or is part of, a tensor that was pinned."""
        storage = tensor.untyped_storage().data_ptr()
        return any(pin.untyped_storage().data_ptr() == storage for pin in self._pins)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Context in which random numbers are the device's."""
        host = torch.default_generator
        before = host.get_state()
        host.set_state(self.random.get_state())
        try:
            yield
        finally:
            self.random.set_state(host.get_state())
            host.set_state(before)


_gpu = Gpu()


class PretendedTensor(Tensor):
    """A tensor on the device. To C++ it is on the CPU, or the autograd engine would look for a GPU."""

    host_tensor: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host_tensor: Tensor) -> PretendedTensor:
        wrapper = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host_tensor.shape,
            strides=host_tensor.stride(),
            storage_offset=host_tensor.storage_offset(),
            dtype=host_tensor.dtype,
            layout=host_tensor.layout,
            device=host_tensor.device,
        )
        wrapper.host_tensor = host_tensor.detach()
        return wrapper  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        collective = func.namespace == "c10d"
        # DDP's reducer scales gradients into buckets that C++ has made, where nobody pretends
        reduces = func is torch.ops.aten.mul.out and not isinstance(kwargs["out"], PretendedTensor)
        copies = func is torch.ops.aten.copy_.default
        if not (collective or copies or reduces):
            _check_one_device(func, (args, kwargs))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        with _gpu.drawing() if draws else nullcontext():
            output = func(*_unwrap(args), **_unwrap(kwargs))
        if copies or reduces:
            return args[0] if copies else kwargs["out"]
        if collective or func is torch.ops.aten._local_scalar_dense.default:
            return output
        return return_and_correct_aliasing(func, args, kwargs, _wrap(output))

    device = property(lambda _: _gpu.device)  # type: ignore[assignment]
    is_cuda = property(lambda _: True)  # type: ignore[assignment]
    is_cpu = property(lambda _: False)  # type: ignore[assignment]

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        # DDP's are views of its buckets
        return _wrap(Tensor.grad.__get__(self))  # type: ignore[attr-defined, no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _check_one_device("data", (self, value))
        self.host_tensor = value.host_tensor  # type: ignore[attr-defined]

    def get_device(self) -> int:
        return _gpu.index

    def data_ptr(self) -> int:
        return self.host_tensor.data_ptr()

    def tolist(self) -> Any:
        return self.host_tensor.tolist()

    def numpy(self, **_: Any) -> Any:  # type: ignore[override]
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def __array__(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        return self.numpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            clone: Tensor = PretendedTensor(self.host_tensor.clone())
            if isinstance(self, torch.nn.Parameter):
                clone = torch.nn.Parameter(clone, self.requires_grad)
            memo[id(self)] = clone
        return memo[id(self)]  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"pretended {self.host_tensor!r}"


def _unwrap(tree: Any) -> Any:
    return tree_map_only(PretendedTensor, lambda tensor: tensor.host_tensor, tree)


def _wrap(tree: Any) -> Any:
    def wrap_tensor(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, PretendedTensor) else PretendedTensor(tensor)

    return tree_map_only(Tensor, wrap_tensor, tree)


def _check_one_device(func: object, arguments: object) -> None:
    """Raise what torch raises where a tensor on the CPU, unless it is a number, meets one on a GPU."""
    tensors = [tensor for tensor in tree_leaves(arguments) if isinstance(tensor, Tensor)]
    host_tensors = [
        tensor for tensor in tensors if tensor.ndim and not isinstance(tensor, PretendedTensor)
    ]
    if host_tensors and len(host_tensors) < len(tensors):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{_gpu.device} and cpu! ({func})"
        )


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        del ctx
        if isinstance(tensor, PretendedTensor):
            return tensor.host_tensor.clone()
        return PretendedTensor(tensor.detach().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _Moved.forward(ctx, gradients[0])


class _Pretending(TorchFunctionMode):
    """Answers the calls that name a device."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        options = dict(kwargs or {})
        if func is Tensor.pin_memory:
            return _gpu.pin(args[0].clone())
        if func is Tensor.is_pinned:
            return _gpu.is_pinned(args[0])
        if func is Tensor.cpu:
            return _move(args[0], torch.device("cpu"), waits=True)
        if func is Tensor.to:
            return _to(*args, **options)
        if func is F.scaled_dot_product_attention and options.get("dropout_p"):
            return _attention(*args, **options)
        if func is Tensor.copy_ and args[0].device.type != args[1].device.type:
            _note(args[1], args[0].device, waits=not options.get("non_blocking"))
        pins = options.pop("pin_memory", False)
        if options.get("device") is None:
            output = func(*args, **options)
            return _gpu.pin(output) if pins else output
        on_gpu = torch.device(options.pop("device")).type == "cuda"
        with _gpu.drawing() if on_gpu and options.get("generator") is None else nullcontext():
            output = func(*_unwrap(args), **options, device="cpu")
        return _wrap(output) if on_gpu else _gpu.pin(output) if pins else output


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *,
    dropout_p: float,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention whose mask is on the tensors' device; that of torch is made in C++."""
    if enable_gqa:
        k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], 1) for heads in (k, v))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if is_causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    return F.dropout(scores.softmax(-1), dropout_p) @ v


def _to(tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
    output = tensor if device is None else _move(tensor, device, waits=not non_blocking)
    how = {} if layout is None else {"memory_format": layout}
    return output.to(dtype or tensor.dtype, copy=copy and output is tensor, **how)


def _move(tensor: Tensor, device: torch.device, *, waits: bool) -> Tensor:
    if tensor.device.type == device.type:
        return tensor
    _note(tensor, device, waits=waits)
    output: Tensor = _Moved.apply(tensor)  # type: ignore[no-untyped-call]
    return output


def _note(tensor: Tensor, device: torch.device, *, waits: bool) -> None:
    is_pinned = tensor.is_cpu and _gpu.is_pinned(tensor)
    thread = threading.current_thread().name
    _gpu.transfers.append(Transfer(device.type, thread, is_pinned, waits))


class _Event:
    """Everything that was asked of the device is done."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, _: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _gpu.calls["Event.synchronize"] += 1

    def elapsed_time(self, _: object) -> float:
        return 1.0


class _AnyGenerator(type):
    def __instancecheck__(cls, candidate: object) -> bool:
        return type(candidate) is torch._C.Generator


class _Generator(metaclass=_AnyGenerator):
    def __new__(cls, _: object = "cpu") -> torch.Generator:  # type: ignore[misc]
        return torch._C.Generator()


class _Stream:
    device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_event(self, _: object) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        pass

    def synchronize(self) -> None:
        _gpu.calls["Stream.synchronize"] += 1


def _answers() -> dict[str, Any]:
    """What `torch.cuda` answers."""
    properties = SimpleNamespace(
        name="Pretended", total_memory=MEMORY_BYTES, major=8, minor=0, multi_processor_count=108
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: DEVICES,
        "current_device": lambda: _gpu.index,
        "set_device": lambda _: None,
        "device": lambda _: nullcontext(),
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (8, 0),
        "get_device_name": lambda *_: properties.name,
        "mem_get_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: 1 << 20,
        "max_memory_reserved": lambda *_: 1 << 20,
        "reset_peak_memory_stats": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "Event": _Event,
        "Stream": _Stream,
        "stream": lambda _: nullcontext(),
        "current_stream": _Stream,
        "manual_seed": lambda seed: _gpu.random.manual_seed(seed),
        "manual_seed_all": lambda seed: _gpu.random.manual_seed(seed),
        "get_rng_state": lambda *_: _gpu.random.get_state(),
        "set_rng_state": lambda state, *_: _gpu.random.set_state(state),
        "default_generators": [_gpu.random],
    }


def _count_calls(name: str, answer: Any) -> Any:
    if not callable(answer) or isinstance(answer, type):
        return answer

    def count_and_call(*args: Any, **kwargs: Any) -> Any:
        _gpu.calls[name] += 1
        return answer(*args, **kwargs)

    return count_and_call


@contextmanager
def device(index: int = 0) -> Iterator[Gpu]:
    """Context in which this process uses the GPU of this index, of `DEVICES`."""
    global _gpu
    before, _gpu = _gpu, Gpu(index)
    join_group = dist.init_process_group
    run_thread, enter, leave = (
        threading.Thread.run,
        torch.autocast.__enter__,
        torch.autocast.__exit__,
    )

    def run(thread: threading.Thread) -> None:
        with _Pretending():
            run_thread(thread)

    def enter_both(context: Any) -> Any:
        if context.device == "cuda":  # kernels are the CPU's, and so are the types they are given
            cpu_context = torch.autocast("cpu", context.fast_dtype, context._enabled)
            context.cpu_context = enter(cpu_context)
        return enter(context)

    def leave_both(context: Any, *error: Any) -> Any:
        result = leave(context, *error)
        if context.device == "cuda":
            leave(context.cpu_context, *error)
        return result

    def join(backend: str, **how: Any) -> None:
        """NCCL is there, and sends over gloo."""
        print(f"{backend} on {how.pop('device_id', 'any device')}", flush=True)
        join_group(backend.replace("nccl", "gloo"), **how)

    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    with ExitStack() as stack:
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        for name, answer in _answers().items():
            stack.enter_context(patch.object(torch.cuda, name, _count_calls(name, answer)))
        stack.enter_context(patch.object(torch.accelerator, "is_available", lambda: True))
        stack.enter_context(patch.object(torch.version, "cuda", "0.0"))
        stack.enter_context(patch.object(record_device, "_GPU_SIDES", (64,)))
        stack.enter_context(patch.object(dist, "init_process_group", join))
        stack.enter_context(patch.object(threading.Thread, "run", run))
        stack.enter_context(patch.object(torch.autocast, "__enter__", enter_both))
        stack.enter_context(patch.object(torch.autocast, "__exit__", leave_both))
        stack.enter_context(patch.object(torch, "Generator", _Generator))
        stack.enter_context(_Pretending())
        try:
            yield _gpu
        finally:
            _gpu = before


def one_gpu_each(argv: Sequence[str]) -> int:
    """`instar ARGV` as one of several ranks."""
    with device(int(os.environ["LOCAL_RANK"])):
        return main(argv)
