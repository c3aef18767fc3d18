"""What growth must know of a live model: the module inside its wrappers, its shape, its names, and how to build a larger
one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.nn import DataParallel, Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from instar.growth.live.adapters import Adapted, adapted_shape, is_of_peft
from instar.growth.plan import GrowthError
from instar.models.hf.pretrained import PretrainedShape
from instar.models.shape import ArchitectureError, Growable

Build = Callable[[Any], Module]
"""Returns a module of a shape."""


@dataclass(frozen=True)
class Subject:
    """A module without wrappers, its shape, and what builds a module of a larger shape."""

    module: Module
    shape: Growable
    build: Build

    def name(self, module_name: str) -> str:
        """Return the name in the shape of a parameter, buffer or submodule."""
        return str(getattr(self.shape, "name", _same)(module_name))

    def module_name(self, name: str) -> str:
        return str(getattr(self.shape, "module_name", _same)(name))

    def parameters(self, module: Module | None = None) -> dict[str, Parameter]:
        """Return the parameters of a module of this family by their names in the shape."""
        pairs = (module or self.module).named_parameters()
        return {self.name(name): parameter for name, parameter in pairs}

    def names(self, module: Module | None = None) -> dict[str, str]:
        """Return the names of the parameters in a module of this family by those in the shape."""
        return {self.name(name): name for name, _ in (module or self.module).named_parameters()}


def subject_of(model: Module, shape: Growable | None = None, build: Build | None = None) -> Subject:
    """Return the subject of a model, and checks that every parameter is named by its shape.

    Raises:
        GrowthError: the model is of no known family, or it is quantised, or divided among devices.
    """
    module = bare(model)
    _refuse_layout(module)
    config = getattr(module, "config", None)
    if shape is None and hasattr(config, "to_dict") and hasattr(config, "model_type"):
        subject = _of_transformers(module, shape_of(config))
    else:
        shape = shape if shape is not None else getattr(module, "shape", None)
        if not (hasattr(shape, "parameters") and hasattr(shape, "resized")):
            raise GrowthError(
                f"{type(module).__name__} is no model of transformers, and has no shape: pass shape=, or "
                "keep it in the attribute `shape` of the module"
            )
        assert shape is not None
        subject = Subject(module, shape, build or type(module))
    if mismatches := _mismatches(subject):
        more = f"; and {len(mismatches) - 4} more" if len(mismatches) > 4 else ""
        raise GrowthError(
            f"the parameters of {type(module).__name__} are not those of its shape: "
            + "; ".join(mismatches[:4])
            + more
        )
    return subject


def _of_transformers(module: Any, shape: PretrainedShape) -> Subject:
    if not any(map(is_of_peft, module.modules())):
        return Subject(module, shape, _Pretrained(module))
    adapter_shape = adapted_shape(module, shape)
    return Subject(module, adapter_shape, Adapted(module, _Pretrained(module.get_base_model())))


def shape_of(config: Any) -> PretrainedShape:
    """Return the shape of a config of transformers.

    Raises:
        GrowthError: its family is unknown, or a value of it is not supported.
    """
    values = config if isinstance(config, Mapping) else config.to_dict()
    try:
        return PretrainedShape(values)
    except ArchitectureError as error:
        raise GrowthError("; ".join(problem.message for problem in error.problems)) from None


@dataclass(frozen=True)
class _Pretrained:
    """Build models of transformers whose config has the new sizes: of the same class, or of that of the family
    with experts."""

    module: Module

    def __call__(self, shape: PretrainedShape) -> Module:
        old: Any = self.module.config
        if shape.config["model_type"] != old.model_type:
            return _of_another_family(shape, old)
        config = copy.deepcopy(old)
        before = old.to_dict()
        for key, value in shape.to_dict().items():
            if key not in before or before[key] != value:
                setattr(config, key, copy.deepcopy(value))
        module: Module = type(self.module)(config)
        return module


def _of_another_family(shape: PretrainedShape, old: Any) -> Module:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = copy.deepcopy(shape.to_dict())
    config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    module: Module = AutoModelForCausalLM.from_config(
        config, attn_implementation=old._attn_implementation
    )
    return module


def _refuse_layout(module: Module) -> None:
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            raise GrowthError(
                f"{name} is of type {parameter.dtype}: quantised weights do not grow; load the model without "
                "quantization_config"
            )
    for name, submodule in module.named_modules():
        if hasattr(submodule, "_hf_hook"):
            raise GrowthError(
                f"{name or 'the model'} is moved between devices by accelerate (device_map): load the model "
                "without device_map"
            )


def _mismatches(subject: Subject) -> list[str]:
    shapes = {name: tuple(p.shape) for name, p in subject.module.named_parameters()}
    if isinstance(subject.shape, PretrainedShape):
        return subject.shape.mismatches(shapes)
    planned_shapes = {name: entry.shape for name, entry in subject.shape.parameters().items()}
    return [
        f"{name}: {shapes.get(name, 'not there')} in the model, {planned_shapes.get(name, 'not there')} in the table"
        for name in {**shapes, **planned_shapes}
        if shapes.get(name) != planned_shapes.get(name)
    ]


def _same(name: str) -> str:
    return name


def wrappers(model: Module) -> Iterator[Module]:
    """Yield a model and what it wraps, from the outside in: `torch.compile`, DDP, moving averages; the last is the
    module itself."""
    while True:
        yield model
        if isinstance(model, DistributedDataParallel | DataParallel | AveragedModel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), Module):
            model = inner
        else:
            return


def bare(model: Module) -> Module:
    """Return the module inside all wrappers."""
    *_, module = wrappers(model)
    return module
