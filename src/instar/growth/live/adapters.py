"""Models with adapters of peft: what LoRA adapts, and how a larger model gets adapters alike."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from instar.growth.plan import GrowthError
from instar.models.hf.adapted import AdaptedShape, Adapter
from instar.models.hf.pretrained import PretrainedShape

Adapters = Mapping[str, Mapping[str, Adapter]]


def is_of_peft(module: Module) -> bool:
    return type(module).__module__.startswith("peft.")


def adapted_shape(model: Any, shape: PretrainedShape) -> AdaptedShape:
    """Returns the shape of a `PeftModel`, of which `shape` is that of its base.

    Raises:
        GrowthError: it has other adapters than plain LoRA, or they are merged.
    """
    if not is_of_peft(model):
        raise GrowthError(
            f"{type(model).__name__} is inside a model with adapters of peft: grow the PeftModel"
        )
    kinds = {str(getattr(each.peft_type, "value", "")) for each in model.peft_config.values()}
    layers = [each for each in model.modules() if hasattr(each, "lora_A")]
    variants = {type(each).__name__ for layer in layers for each in layer.lora_variant.values()}
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

    def __call__(self, shape: AdaptedShape) -> Module:
        configs = {name: copy.deepcopy(each) for name, each in self.model.peft_config.items()}
        grown = self._around(shape, configs)
        if _adapters(shape, grown) != shape.adapters:
            # patterns and indices of layers do not say the same of a deeper model
            for name, config in configs.items():
                _name_modules(config, name, shape)
            grown = self._around(shape, configs)
        for layer, adapters in shape.adapters.items():
            module = grown.get_submodule(shape.module_name(layer))
            for name, each in adapters.items():
                if each.rank:
                    module.scaling[name] = each.scale
        grown.base_model.set_adapter(self.model.active_adapters)
        grown.active_adapter = self.model.active_adapter
        made: Module = grown
        return made

    def _around(self, shape: AdaptedShape, configs: Mapping[str, Any]) -> Any:
        begun = {name: config.init_lora_weights for name, config in configs.items()}
        for config in configs.values():
            config.init_lora_weights = True  # others compute values from the weights, or from data
            config.base_model_name_or_path = ""  # the model of that name is smaller
        (first, config), *others = configs.items()
        grown = type(self.model)(self.build(shape), config, first, autocast_adapter_dtype=False)
        for name, config in others:
            grown.add_adapter(name, config)
        for name, config in configs.items():
            config.init_lora_weights = begun[name]
        return grown


def _adapters(shape: AdaptedShape, model: Any) -> Adapters:
    """Returns the adapters of a model by the names of a shape of its family."""
    found: dict[str, dict[str, Adapter]] = {}
    for path, each in model.named_modules():
        if hasattr(each, "lora_A"):
            ranks = {name: Adapter(rank, each.scaling[name]) for name, rank in each.r.items()}
            found[shape.name(path)] = ranks
        elif hasattr(each, "original_module") and hasattr(each, "modules_to_save"):
            found[shape.name(path)] = {name: Adapter(0) for name in each.modules_to_save}
    return found


def _name_modules(config: Any, adapter: str, shape: AdaptedShape) -> None:
    """Makes the config of an adapter name every module with its rank and scale."""
    modules = {
        shape.module_name(layer).removeprefix("base_model.model."): adapters[adapter]
        for layer, adapters in shape.adapters.items()
        if adapter in adapters
    }
    lora = {name: each for name, each in modules.items() if each.rank}
    power = math.sqrt if config.use_rslora else float
    config.target_modules = set(lora)
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    config.rank_pattern = {re.escape(name): each.rank for name, each in lora.items()}
    config.alpha_pattern = {
        re.escape(name): each.scale * power(each.rank) for name, each in lora.items()
    }
    config.modules_to_save = [name for name, each in modules.items() if not each.rank] or None
