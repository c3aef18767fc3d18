"""What growth must know of a live model: the module inside its wrappers, its shape, its names, and how to build a larger
one; also of a model of transformers with adapters of peft.

A matrix (o, i) has beside it A (rank, i), ``<weight>.lora_A.<adapter>.weight``, and B (o, rank): their outer axes are
those of the matrix, so that a plan for it is one for them too, and the ranks stay.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import nn
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from instar.growth.attributes import Reference
from instar.growth.plan import GrowthError, GrowthPlan
from instar.models.hf.pretrained import PretrainedShape
from instar.models.shape import (
    ArchitectureError,
    Growable,
    Kind,
    Parameter,
    axis_size,
    in_block,
    layer_of,
)

Build = Callable[[Any], Module]
"""Returns a module of a shape."""

logger = logging.getLogger(__name__)

_PREFIX = "base_model.model."

_HOW_TO_BEGIN = ("corda_config", "eva_config", "lora_ga_config")

_LEAVES_THE_BASE = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
"""Values of `init_lora_weights` with which adapters do not change the weights that they begin beside."""


@dataclass(frozen=True)
class Subject:
    """A module without wrappers, its shape, and what builds a module of a larger shape."""

    module: Module
    shape: Growable
    build: Build
    reference: Reference = field(default_factory=Reference)
    """tells which attributes of the module were set by hand"""

    def name(self, module_name: str) -> str:
        """Return the name in the shape of a parameter, buffer or submodule."""
        return str(getattr(self.shape, "name", _same)(module_name))

    def module_name(self, name: str) -> str:
        return str(getattr(self.shape, "module_name", _same)(name))

    def origin(self, path: str, plan: GrowthPlan) -> str | None:
        """Return the path of the submodule that one of a grown module continues or copies; None: it is new."""
        name = self.name(path)
        source = plan.submodule(name)
        return path if source == name else None if source is None else self.module_name(source)

    def parameters(self, module: Module | None = None) -> dict[str, nn.Parameter]:
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


@dataclass(frozen=True)
class Adapter:
    """One adapter of one module: its rank, and the factor of B A; of rank 0: a copy of the module that trains
    in its place (`modules_to_save`)."""

    rank: int
    scale: float = 1.0


Adapters = Mapping[str, Mapping[str, Adapter]]
"""By the name of the adapted module in the shape, then by their own names."""


@dataclass(frozen=True)
class AdaptedShape(PretrainedShape):
    """The shape of a `PeftModel`."""

    adapters: Adapters = field(default_factory=dict)

    def parameters(self) -> dict[str, Parameter]:
        table: dict[str, Parameter] = {}
        for name, entry in super().parameters().items():
            module, _, part = name.rpartition(".")
            adapters = self.adapters.get(module, {})
            copies = [
                f"modules_to_save.{adapter}" for adapter in adapters if not adapters[adapter].rank
            ]
            if copies:
                names = (f"{module}.{place}.{part}" for place in ("original_module", *copies))
                table |= dict.fromkeys(names, entry)
            else:
                table[f"{module}.base_layer.{part}" if adapters else name] = entry
            if part == "weight":
                table |= self._factors(module, entry)
        return table

    def _factors(self, module: str, weight: Parameter) -> Iterator[tuple[str, Parameter]]:
        is_table = weight.kind == "embedding"
        source, output = weight.axes if is_table else (weight.reads, weight.writes)
        for adapter, adapters in self.adapters.get(module, {}).items():
            if not adapters.rank or source is None or output is None:
                continue
            inputs, outputs = (axis_size(self.sizes(), axis) for axis in (source, output))
            # as peft draws them: Kaiming's uniform values with a = √5
            std = 1 / math.sqrt(3 * inputs)
            names = (f"{module}.lora_{side}.{adapter}.weight" for side in "AB")
            if is_table:
                names = (f"{module}.lora_embedding_{side}.{adapter}" for side in "AB")
            kind: Kind = "grouped" if is_table else "matrix"  # its columns are rows of a table
            yield next(names), Parameter(("rank", source), (adapters.rank, inputs), kind, std)
            yield (
                next(names),
                Parameter((output, "rank"), (outputs, adapters.rank), "matrix", 0.0, weight.parts),
            )

    def refusals(self) -> dict[str, str]:
        reason = "experts have no adapters of peft: merge them first (merge_and_unload)"
        return {**super().refusals(), "upcycle": reason}

    def deeper(self, sources: Sequence[int | None]) -> Self:
        """Return a copy in which adapters move with their blocks; a drawn block has those of the one below."""
        layers: list[int] = []
        for source in sources:
            layers.append(source if source is not None else layers[-1] if layers else 0)
        adapters_inside = {
            in_block(name, at): adapter
            for at, source in enumerate(layers)
            for name, adapter in self.adapters.items()
            if layer_of(name) == source
        }
        outside = {
            name: adapter for name, adapter in self.adapters.items() if layer_of(name) is None
        }
        return replace(super().deeper(sources), adapters={**outside, **adapters_inside})

    def module_name(self, name: str) -> str:
        return _PREFIX + super().module_name(name)

    def name(self, module_name: str) -> str:
        return super().name(module_name.removeprefix(_PREFIX))


def is_of_peft(module: Module) -> bool:
    return type(module).__module__.startswith("peft.")


def adapted_shape(model: Any, shape: PretrainedShape) -> AdaptedShape:
    """Return the shape of a `PeftModel`, of which `shape` is that of its base.

    Raises:
        GrowthError: it has other adapters than plain LoRA, or they are merged.
    """
    if not is_of_peft(model):
        raise GrowthError(
            f"{type(model).__name__} is inside a model with adapters of peft: grow the PeftModel"
        )
    kinds = {str(getattr(config.peft_type, "value", "")) for config in model.peft_config.values()}
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    variants = {
        type(variant).__name__ for layer in layers for variant in layer.lora_variant.values()
    }
    if odd := sorted((kinds - {"LORA"}) or variants):
        raise GrowthError(
            f"adapters of kind {odd[0]} do not grow, only plain LoRA: merge them first (merge_and_unload), "
            "grow, and add new ones"
        )
    if any(layer.merged for layer in layers):
        raise GrowthError("adapters are merged into their weights: call unmerge_adapter() first")
    empty = AdaptedShape(shape.config)
    return AdaptedShape(shape.config, _adapters(empty, model))


@dataclass(frozen=True)
class Adapted:
    """Builds models of peft of the same class with the same adapters, around a base that `build` returns."""

    model: Any
    build: Callable[[Any], Module]
    shape: AdaptedShape
    """of the model"""

    def __call__(self, shape: AdaptedShape) -> Module:
        configs = {name: copy.deepcopy(config) for name, config in self.model.peft_config.items()}
        larger_model = self._around(shape, configs)
        if _adapters(shape, larger_model) != shape.adapters:
            # patterns and indices of layers do not say the same of a deeper model
            for name, config in configs.items():
                _name_modules(config, name, shape)
            larger_model = self._around(shape, configs)
        for layer, adapters in shape.adapters.items():
            module = larger_model.get_submodule(shape.module_name(layer))
            for name, adapter in adapters.items():
                if adapter.rank:
                    module.scaling[name] = adapter.scale
        larger_model.base_model.set_adapter(self.model.active_adapters)
        larger_model.active_adapter = self.model.active_adapter
        larger_module: Module = larger_model
        return larger_module

    def _around(self, shape: AdaptedShape, configs: Mapping[str, Any]) -> Any:
        inits = {name: config.init_lora_weights for name, config in configs.items()}
        for config in configs.values():
            config.init_lora_weights = True  # others compute values from the weights, or from data
            config.base_model_name_or_path = ""  # the model of that name is smaller
        (first, config), *more = configs.items()
        larger_model = type(self.model)(
            self.build(shape), config, first, autocast_adapter_dtype=False
        )
        for name, config in more:
            larger_model.add_adapter(name, config)
        for name, config in configs.items():
            if inits[name] in _LEAVES_THE_BASE:
                config.init_lora_weights = inits[name]
                continue
            # PiSSA, OLoRA and their like took a part out of the base. Who loads the adapters beside that base must not
            # take it out again, and a larger base has other parts
            for key in _HOW_TO_BEGIN:
                setattr(
                    config, key, None
                )  # peft warns of one that is not in use, wherever the adapters are loaded
            if shape == self.shape:
                continue  # a model that is only compared
            logger.warning(
                "init_lora_weights of the adapters %r is True from now on, no longer %r: save the base with them "
                "(model.unload().save_pretrained), whose weights are not those that it was loaded with",
                name,
                inits[name],
            )
        return larger_model


def _of_transformers(module: Any, shape: PretrainedShape) -> Subject:
    if not any(map(is_of_peft, module.modules())):
        return Subject(module, shape, _Pretrained(module))
    adapter_shape = adapted_shape(module, shape)
    return Subject(
        module, adapter_shape, Adapted(module, _Pretrained(module.get_base_model()), adapter_shape)
    )


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


def _adapters(shape: AdaptedShape, model: Any) -> Adapters:
    """Return the adapters of a model by the names of a shape of its family."""
    adapters: dict[str, dict[str, Adapter]] = {}
    for path, module in model.named_modules():
        if hasattr(module, "lora_A"):
            ranks = {name: Adapter(rank, module.scaling[name]) for name, rank in module.r.items()}
            adapters[shape.name(path)] = ranks
        elif hasattr(module, "original_module") and hasattr(module, "modules_to_save"):
            adapters[shape.name(path)] = {name: Adapter(0) for name in module.modules_to_save}
    return adapters


def _name_modules(config: Any, adapter: str, shape: AdaptedShape) -> None:
    """Make the config of an adapter name every module with its rank and scale."""
    modules = {
        shape.module_name(layer).removeprefix(_PREFIX): adapters[adapter]
        for layer, adapters in shape.adapters.items()
        if adapter in adapters
    }
    lora = {name: adapter for name, adapter in modules.items() if adapter.rank}
    power = math.sqrt if config.use_rslora else float
    config.target_modules = set(lora)
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    config.rank_pattern = {re.escape(name): adapter.rank for name, adapter in lora.items()}
    config.alpha_pattern = {
        re.escape(name): adapter.scale * power(adapter.rank) for name, adapter in lora.items()
    }
    config.modules_to_save = [name for name, adapter in modules.items() if not adapter.rank] or None
