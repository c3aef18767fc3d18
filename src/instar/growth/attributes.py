"""Attributes that were set by hand on submodules, such as `dropout.p`: which of them a grown model keeps.

A grown model is built by its class, with the values that its constructor sets. Which values of the old model are others, a reference
tells: a new model of the old shape. A plain value that differs from it is carried if the constructor sets the same
in both shapes, so that it does not depend on the shape. Whatever else differs is named.
"""

from __future__ import annotations

import random
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from instar.models.module import ResetsBuffers, parameters_on_meta

Origin = Callable[[str], str | None]
"""Returns the path of the old submodule that a submodule of the grown model continues or copies; None: it is new."""

_CONSTANTS = (Number, str, bytes, type(None), torch.dtype, torch.device, Enum)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial, type)
_CONTAINERS = (list, tuple, dict, set, frozenset)

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
"""Parts of paths that activation checkpointing and `torch.compile` add to those of submodules."""

_ABSENT: Any = object()

_SHOWN = 6


@dataclass(frozen=True)
class Reference:
    """A new model of the shape that a model has now; its parameters have no memory."""

    module: Module | None = None
    """None: there is none, and nothing is compared"""
    problem: str = ""
    """why it could not be built"""

    def if_on_all(self, holds: bool) -> Reference:
        """Return it if all processes have one, else none on any: they must carry the same values."""
        if holds or self.module is None:
            return self
        return Reference(None, "another process could not build a new one")


class Value(NamedTuple):
    """The value of an attribute of a submodule of the grown model."""

    path: str
    name: str
    value: Any


@dataclass(frozen=True)
class AttributeComparison:
    """What was set by hand on an old model, and what becomes of it in the grown one."""

    transfers: tuple[Value, ...] = ()
    """values that the grown model takes"""
    resets: tuple[str, ...] = ()
    """what the grown model has by its class instead, in words"""
    problem: str = ""
    """why nothing could be compared"""

    @property
    def warning(self) -> str:
        """What to tell whoever set the values; empty: nothing is lost."""
        if self.problem:
            return (
                "attributes that were set by hand on submodules, if any, are those of the class again: they cannot be "
                f"told from those of a new model ({self.problem})"
            )
        if not self.resets:
            return ""
        more = f" and {len(self.resets) - _SHOWN} more" if len(self.resets) > _SHOWN else ""
        return (
            "set by hand, and now as the class sets it: "
            f"{', '.join(self.resets[:_SHOWN])}{more}; set it once more after the growth"
        )


def build_reference(build: Callable[[], Module]) -> Reference:
    """Build a reference; generators of random numbers are as before.

    A class that cannot be built without memory, because it reads values of its parameters, has no reference.

    Raises:
        MemoryError: raised by `build`.
    """
    try:
        with _generators_kept(), parameters_on_meta():
            return Reference(build())
    except MemoryError:
        raise
    except Exception as error:
        return Reference(None, f"{type(error).__name__}: {error}")


def compare_attributes(
    old: Module, reference: Reference, new: Module, origin: Origin, *, with_additional: bool
) -> AttributeComparison:
    """Compare an old model with its reference and with the grown model; nothing is changed.

    Public attributes are compared, and tensors that no checkpoint holds; not `training`, and no caches: numbers that are called so,
    and what the class leaves empty and use fills. In a submodule that has something else that is not carried, only numbers
    that the class sets to a float are carried: other values, such as a length, may belong to that.

    Args:
        with_additional: compare attributes, too, that the class does not have; False: the caller carries them.
    """
    fresh = reference.module
    if fresh is None:
        return AttributeComparison(problem=reference.problem)
    if _class_of(old) != _class_of(fresh):
        return AttributeComparison()  # another class is built on purpose
    olds, news = _submodules(old), _submodules(new)
    replacements, pairs = _pairs(olds, _submodules(fresh))
    with_buffers = not isinstance(fresh, ResetsBuffers)
    changes = {
        path: _changes(*pair, with_buffers=with_buffers, with_additional=with_additional)
        for path, pair in pairs.items()
    }
    fates: dict[Module, _Fate] = {}
    with_heir: set[Module] = set()
    for path, module in news.items():
        source = origin(path)
        if source in changes and _class_of(olds[source]) == _class_of(module):
            with_heir.add(olds[source])
            fate = _fate(path, changes[source], module)
            fates[module] = fates[module].joined(fate) if module in fates else fate
    return AttributeComparison(
        tuple(
            Value(fate.path, *item) for fate in fates.values() for item in fate.transfers.items()
        ),
        (
            *replacements,
            *(text for fate in fates.values() for text in fate.texts()),
            *_without_heir(olds, changes, with_heir),
        ),
    )


def carry_attributes(new: Module, values: Iterable[Value]) -> None:
    """Set values on the submodules of a grown model."""
    submodules = _submodules(new)
    for path, name, value in values:
        # not by setattr: a setter of the class may set other attributes, which are carried themselves
        vars(submodules[path])[name] = value


@dataclass(frozen=True)
class _Changes:
    """Where a submodule differs from that of the reference."""

    values: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """its value and that of the reference, by the attribute's name"""
    has_uncarried: bool = False
    """whether it holds what is not carried and other values may belong to: tensors that use has filled it with, such as
    a table for the longest sample, or a function under a private name"""


@dataclass(frozen=True)
class _Fate:
    """What becomes of the changed attributes of a submodule in the grown model."""

    path: str
    transfers: Mapping[str, Any]
    resets: Mapping[str, tuple[Any, Any]]
    """its value and that of the grown model"""
    now: Mapping[str, Any]
    """what the grown model has where `transfers` has a value"""

    def joined(self, other: _Fate) -> _Fate:
        """Return the fate of a submodule that two old ones lead to, since the class shares it: what both say."""
        transfers = {
            name: value
            for name, value in self.transfers.items()
            if name in other.transfers and _same(value, other.transfers[name])
        }
        disputes = {
            name: (value, fate.now[name])
            for fate in (self, other)
            for name, value in fate.transfers.items()
            if name not in transfers
        }
        return _Fate(
            self.path,
            transfers,
            {**self.resets, **other.resets, **disputes},
            {**self.now, **other.now},
        )

    def texts(self) -> Iterator[str]:
        for name, (value, now) in self.resets.items():
            yield f"{_full_name(self.path, name)} ({_text(value)}, now {_text(now)})"


def _fate(path: str, changes: _Changes, new: Module) -> _Fate:
    transfers, resets, now = dict[str, Any](), dict[str, tuple[Any, Any]](), dict[str, Any]()
    attributes = _attributes(new)
    for name, (value, by_class) in changes.values.items():
        current = _value(new, attributes, name)
        if _same(current, value):
            continue
        if _is_constant(value) and _is_constant(by_class) and _same(current, by_class):
            transfers[name], now[name] = value, current
        else:
            resets[name] = value, current
    if resets or changes.has_uncarried:
        dependents = [
            name
            for name, current in now.items()
            if not isinstance(current, float) and (changes.has_uncarried or current is not _ABSENT)
        ]
        values = {name: (transfers.pop(name), now[name]) for name in dependents}
        # what use has added to a module goes with the rest of its cache
        resets |= {name: pair for name, pair in values.items() if pair[1] is not _ABSENT}
    return _Fate(path, transfers, resets, now)


def _pairs(
    olds: Mapping[str, Module], fresh: Mapping[str, Module]
) -> tuple[list[str], dict[str, tuple[Module, Module]]]:
    """Return which submodules were replaced, added or removed by hand, in words, and the other ones of both models."""
    texts: dict[str, str] = {}
    pairs: dict[str, tuple[Module, Module]] = {}
    for path in (*olds, *(path for path in fresh if path not in olds)):
        old, new = olds.get(path), fresh.get(path)
        if any(path.startswith(f"{outer}.") for outer in texts):
            continue
        if old is not None and new is not None and _class_of(old) == _class_of(new):
            pairs[path] = old, new
        else:
            texts[path] = f"{path} ({_class_text(old)}, now {_class_text(new)})"
    return list(texts.values()), pairs


def _without_heir(
    olds: Mapping[str, Module], changes: Mapping[str, _Changes], with_heir: set[Module]
) -> list[str]:
    """Return, in words, what was set on submodules that no submodule of the grown model continues."""
    texts: dict[tuple[Module, str], str] = {}
    for path, changed in changes.items():
        for name, (value, _) in changed.values.items():
            if olds[path] not in with_heir:
                text = f"{_full_name(path, name)} ({_text(value)}, now {_text(_ABSENT)})"
                texts.setdefault((olds[path], name), text)
    return list(texts.values())


def _changes(old: Module, fresh: Module, *, with_buffers: bool, with_additional: bool) -> _Changes:
    of_fresh = _attributes(fresh)
    pairs = {
        name: (value, _value(fresh, of_fresh, name)) for name, value in _attributes(old).items()
    }
    differences = {
        name: (value, first)
        for name, (value, first) in pairs.items()
        if not _same(value, first) and (with_additional or first is not _ABSENT)
    }
    fillings = {name for name, (value, first) in differences.items() if _is_filled(first, value)}
    caches = {name for name, (value, _) in differences.items() if _is_cache(name, value)}
    has_uncarried = bool(caches) or any(_holds_tensors(differences[name][0]) for name in fillings)
    # such as what `gradient_checkpointing_enable` of transformers sets beside its switch
    has_uncarried |= with_additional and any(
        name.startswith("_")
        and isinstance(value, _FUNCTIONS)
        and name not in vars(fresh)
        and not hasattr(type(fresh), name)
        for name, value in vars(old).items()
    )
    values = {
        name: pair
        for name, pair in differences.items()
        if name not in fillings | caches
        and (name in vars(old) or (with_buffers and not caches))  # else the module computes it
    }
    return _Changes(values, has_uncarried)


def _attributes(module: Module) -> dict[str, Any]:
    """Return the public attributes of a module, and its tensors that no checkpoint holds."""
    public = {name: value for name, value in vars(module).items() if _is_public(type(module), name)}
    buffers = {name: module._buffers.get(name) for name in module._non_persistent_buffers_set}
    return public | {name: value for name, value in buffers.items() if value is not None}


def _value(module: Module, attributes: Mapping[str, Any], name: str) -> Any:
    """Return the value of an attribute of a module, or that of its class if this is plain."""
    by_class = getattr(type(module), name, _ABSENT)
    return attributes.get(name, by_class if _is_constant(by_class) else _ABSENT)


def _is_public(of: type[Module], name: str) -> bool:
    if not name.startswith("_"):
        return name != "training"
    # what a public setter stores
    setter = getattr(of, name.lstrip("_"), None)
    return isinstance(setter, property) and setter.fset is not None


def _is_cache(name: str, value: Any) -> bool:
    """Return whether an attribute says what has been cached, such as `max_seq_len_cached`; not `use_cache`."""
    return "cache" in name and not isinstance(value, bool)


def _is_constant(value: Any) -> bool:
    """Return whether a value is plain, and nobody can change it in place."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is _ABSENT or isinstance(value, _CONSTANTS)


def _is_filled(first: Any, value: Any) -> bool:
    """Return whether the class leaves an attribute empty and use fills it, as a cache."""
    is_empty = first is None or first is _ABSENT or (isinstance(first, _CONTAINERS) and not first)
    return is_empty and not _is_constant(value) and not isinstance(value, _FUNCTIONS)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, Tensor) or (
        isinstance(value, list | tuple) and any(map(_holds_tensors, value))
    )


def _same(a: Any, b: Any) -> bool:
    """Return whether two values are equal as far as anybody can tell: objects are if they are of one class."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _same_tensor(a, b)
    if isinstance(a, torch.device) and isinstance(b, torch.device):
        return a == b or "meta" in (a.type, b.type)  # the reference's, which nobody set
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        return (
            a.__code__ == b.__code__
        )  # one that the constructor defines is another object each time
    if isinstance(a, MethodType) and isinstance(b, MethodType):
        return a.__func__ is b.__func__
    if isinstance(a, partial) and isinstance(b, partial):
        return _same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    known = (*_CONSTANTS, *_FUNCTIONS, set, frozenset)
    if isinstance(a, known) or isinstance(b, known):
        try:
            return bool(a == b or (a != a and b != b))
        except Exception:  # of a foreign class
            return False
    return type(a) is type(b)


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding, on any device and in any dtype; unknown values are."""
    if a.shape != b.shape or a.is_floating_point() != b.is_floating_point():
        return False
    if a.is_meta or b.is_meta:
        return True
    if not a.is_floating_point():
        return bool((a.detach().cpu() == b.detach().cpu()).all())
    rounding = 4 * max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    return torch.allclose(a, b, rtol=rounding, atol=0.0, equal_nan=True)


def _submodules(module: Module) -> dict[str, Module]:
    """Return a module and its submodules by path, a shared one by all of its paths."""
    return {
        ".".join(part for part in path.split(".") if part not in _WRAPPERS): submodule
        for path, submodule in module.named_modules(remove_duplicate=False)
    }


def _class_of(module: Module) -> tuple[str, str]:
    """Return the name of a module's class, which a notebook may have defined again; without `fully_shard`'s."""
    # importing the module takes a while, and without it there are no sharded modules
    fsdp = sys.modules.get("torch.distributed.fsdp")
    is_sharded = fsdp is not None and isinstance(module, fsdp.FSDPModule)
    own = type(module).__mro__[2] if is_sharded else type(module)
    return own.__module__, own.__qualname__


def _class_text(module: Module | None) -> str:
    return "nothing" if module is None else _class_of(module)[1].rpartition(".")[2]


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    if _is_constant(value):
        return reprlib.repr(value)
    return str(getattr(value, "__name__", None) or type(value).__name__)


def _full_name(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Context manager that restores the global generators of random numbers at its end."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
