"""A foreign `config.json` as transformers understands it: completed by the defaults of its class, or refused.

What transformers would read and Instar does not know, a model would silently be another by: such a key is refused
by name. The names are those of transformers' own code, so that they are never older than the library.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from instar.checkpoint.manifest import CheckpointError
from instar.models.hf import CONFIG
from instar.models.hf.config import is_bounded
from instar.models.hf.families import FAMILIES

LEGACY: Mapping[str, str] = dict.fromkeys(
    ("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"),
    "rope_parameters",
) | {"sliding_window_pattern": "layer_types"}
"""Keys of older configs, and the key that transformers makes of each."""
_COMMON = ("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
_INERT = frozenset(
    {
        "architectures",
        "classifier_dropout",
        "dtype",
        "gradient_checkpointing",
        "id2label",
        "init_std",
        "initializer_factor",
        "label2id",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "tags",
        "torch_dtype",
        "transformers_version",
        "use_return_dict",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
    }
)
"""Keys that do not change what a causal language model in float32 computes."""
_MUST: Mapping[str, tuple[object, ...]] = {
    "chunk_size_feed_forward": (0, None),
    "is_encoder_decoder": (False, None),
    "attn_implementation": (None, "eager", "sdpa"),
    "_attn_implementation": (None, "eager", "sdpa"),
    "_attn_implementation_internal": (None, "eager", "sdpa"),
    "per_layer_config": (None, {}),
}
_READS = re.compile(
    r"config\.([A-Za-z_]\w*)"
    r"|attr\([^()]*config[^()]*,\s*[\"'](\w+)[\"']"
    r"|kwargs(?:\.(?:get|pop|setdefault))?[\(\[]\s*[\"'](\w+)[\"']"
)
"""How transformers' code reads a key."""
_SHARED = (
    "cache_utils",
    "configuration_utils",
    "masking_utils",
    "modeling_rope_utils",
    "modeling_utils",
)


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of a known family as transformers reads it, with its defaults.

    Raises:
        CheckpointError: transformers refuses it or is not installed, a number is out of all bounds, or it has
            keys that transformers reads and nothing here knows.
    """
    config_type = config_class(config)
    values = {key: copy.deepcopy(config[key]) for key in config if key in keys_of(config)}
    problems = [
        f"{key}: {value!r:.60} is out of all bounds"
        for key, value in values.items()
        if not is_bounded(value)
    ]
    problems += _not_understood(config, config_type)
    if problems:
        raise CheckpointError("\n  ".join([f"{CONFIG}:", *problems]))
    try:
        config_dict: dict[str, Any] = config_type(**values).to_dict()
    except Exception as error:  # a config of anyone's: whatever transformers makes of it
        raise CheckpointError(f"{CONFIG}: transformers refuses it: {error}") from error
    return config_dict


def keys_of(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys that say what a model of this family computes."""
    config_type = config_class(config)

    from transformers import PreTrainedConfig

    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    field_names = {field.name for field in dataclasses.fields(config_type)} - common
    sizes = FAMILIES[config["model_type"]].axes.values()
    return frozenset({*field_names, *LEGACY, *_COMMON, *config_type.attribute_map, *sizes})


def explicit_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `config.json` must say for a model of a completed config: all values, so that none is derived anew
    from one that changed."""
    keys = keys_of(config) - LEGACY.keys()
    identity = {key: config[key] for key in ("model_type", "architectures") if config.get(key)}
    return {**identity, **{key: config[key] for key in sorted(keys) if key in config}}


def config_class(config: Mapping[str, Any]) -> Any:
    """Return the class of a config, of transformers itself."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise CheckpointError(
            f"folders of transformers need transformers ({error}): pip install 'instar[loops]'"
        ) from error
    return CONFIG_MAPPING[config["model_type"]]


def _not_understood(config: Mapping[str, Any], config_type: Any) -> Iterator[str]:
    from transformers import GenerationConfig

    # transformers moves these to the settings of generation
    accepted_keys = keys_of(config) | _INERT | {*GenerationConfig().to_dict()}
    read = _names_read(config_type.__module__)
    for key, value in config.items():
        if key in _MUST:
            if value not in _MUST[key]:
                yield f"{key} is {value!r:.60}; only {_MUST[key][0]!r} is supported"
        elif key not in accepted_keys and (key in read or hasattr(config_type, key)):
            yield f"{key}: transformers reads it, and Instar does not know what it changes"


@cache
def _names_read(module: str) -> frozenset[str]:
    """Return the keys that the code of a family reads, beside those that its class declares."""
    modules = (
        module,
        module.replace(".configuration_", ".modeling_"),
        *(f"transformers.{name}" for name in _SHARED),
    )
    origins = [spec.origin for name in modules if (spec := importlib.util.find_spec(name))]
    texts = [Path(origin).read_text(encoding="utf-8") for origin in origins if origin]
    return frozenset(
        name for text in texts for names in _READS.findall(text) for name in names if name
    )
