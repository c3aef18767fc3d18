"""The keys of Instar that nanoGPT's arguments are, and the shape of its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from instar.checkpoint.manifest import CheckpointError
from instar.models.architecture import Architecture
from instar.models.shape import ArchitectureError

SEED = 1337
"""which nanoGPT's `train.py` has"""
_SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
_RENAMED = {
    "batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "beta1": "optimizer.beta1",
    "beta2": "optimizer.beta2",
    "eval_interval": "eval.eval_interval",
    "eval_iters": "eval.eval_iters",
    "log_interval": "record.log_interval",
}
_OF_MODEL = {"n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "dropout"}
_OF_PLACE = {"dataset", "device", "dtype", "out_dir", "init_from", "eval_only", "backend"}
"""What says where and how that process ran, not what it trained"""


def shape_of(model_args: Mapping[str, Any]) -> Architecture:
    """Return the shape of the model that nanoGPT makes of its `model_args`.

    Raises:
        CheckpointError: one is missing or no model can have it.
    """
    if missing := [name for name in _SHAPE if type(model_args.get(name)) is not int]:
        raise CheckpointError(f"its model_args have no whole number {', '.join(missing)}")
    layers, heads, width = (model_args[name] for name in ("n_layer", "n_head", "n_embd"))
    if heads < 1 or width % heads:
        raise CheckpointError(f"its model_args have {heads} heads for a width of {width}")
    try:
        return Architecture(
            n_layer=layers,
            n_head=heads,
            n_kv_head=heads,
            head_dim=width // heads,
            n_embd=width,
            n_mlp=4 * width,
            context=model_args["block_size"],
            vocab_size=model_args["vocab_size"],
            norm="layernorm",
            activation="gelu",
            positions="learned",
            bias=bool(model_args.get("bias", True)),
            tied=True,
            qk_norm=False,
            rope_base=10_000.0,
            norm_eps=1e-5,
            qk_norm_eps=1e-5,
            dropout=float(model_args.get("dropout") or 0.0),
        )
    except ArchitectureError as error:
        raise CheckpointError(f"no model can have its model_args:\n{error}") from None


def settings_of(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of dotted keys that nanoGPT's arguments are, and the arguments that have none.

    Arguments that are not there leave Instar's defaults.
    """
    values: dict[str, Any] = {"seed": SEED}
    values |= {key: config[name] for name, key in _RENAMED.items() if name in config}
    values |= dict(_in_other_units(config))
    known = {*_RENAMED, *_OF_MODEL, *_OF_PLACE, "max_iters", "grad_clip", "warmup_iters"}
    known |= {"lr_decay_iters", "min_lr", "decay_lr"}
    if config.get("dtype") == "float16" and "precision" not in values:
        known.remove("dtype")
    return values, sorted(config.keys() - known)


def _in_other_units(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys whose values are nanoGPT's in other units."""
    if "max_iters" in config:
        yield "train.until", [f"{config['max_iters']}it"]
    if "grad_clip" in config:
        yield "train.clip", config["grad_clip"] or None
    if config.get("decay_lr") is False:
        yield "learning_rate.shape", "constant"
        yield "learning_rate.warmup_iters", 0
    else:
        for name in ("warmup_iters", "lr_decay_iters"):
            if name in config:
                yield f"learning_rate.{name}", config[name]
        peak, lowest = config.get("learning_rate"), config.get("min_lr")
        if isinstance(peak, int | float) and isinstance(lowest, int | float) and peak > 0:
            yield "learning_rate.min_lr_ratio", lowest / peak
    if config.get("dtype") == "float32" or config.get("device") == "cpu":
        yield "precision", "fp32"  # on a CPU, nanoGPT does not lower it
