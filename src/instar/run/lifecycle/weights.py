"""Reads the weights that a run starts from, see `start`, and loads them into its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module

from instar.checkpoint.inspect import check_shapes
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import Checkpoint, load
from instar.config.fields import LANGUAGE
from instar.models.architecture import Architecture
from instar.models.hf.folder import read_weights
from instar.models.hf.tensors import from_tensors, merged
from instar.run.lifecycle.restore import load_model
from instar.run.lifecycle.start import Weights
from instar.run.loop.optimizer import copy_tensors

LoadWeights = Callable[[Module], list[str]]
"""Loads weights into a new model; returns warnings about buffers that one of them lacks."""

_POSITIONS = "position_embedding.weight"


def open_weights(weights: Weights, architecture: Any) -> LoadWeights:
    """Read weights, of a checkpoint the moving average if it has one, and check them.

    Args:
        architecture: of the new model; of a GPT, it may have a shorter context than the weights.

    Raises:
        CheckpointError: the weights are damaged, of another model than they say, or not finite.
    """
    if weights.task != LANGUAGE:
        return partial(_load_saved, load(weights.path))
    shape = Architecture.from_dict(weights.architecture)
    if weights.is_hf:
        tensors = from_tensors(shape, read_weights(weights.path))
    else:
        checkpoint = load(weights.path)
        component = _component(checkpoint)
        shapes = {name: entry.shape for name, entry in shape.parameters().items()}
        check_shapes(checkpoint.path, checkpoint.layout(component).entries, shapes)
        tensors = merged(shape, checkpoint.tensors(component))
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise CheckpointError(
            f"{weights.path}: {len(broken)} tensors, the first {broken[0]}, hold values that are not "
            "finite (NaN or infinite)"
        )
    if _POSITIONS in tensors:
        tensors[_POSITIONS] = tensors[_POSITIONS][: architecture.context]
    return partial(_copy, tensors)


def _copy(tensors: Mapping[str, Tensor], model: Module) -> list[str]:
    copy_tensors(dict(model.named_parameters()), tensors)
    return []


def _load_saved(checkpoint: Checkpoint, model: Module) -> list[str]:
    try:
        warnings = load_model(model, checkpoint)
        if (component := _component(checkpoint)) != "model":
            copy_tensors(dict(model.named_parameters()), checkpoint.tensors(component))
    except (AttributeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path}: of another model: {error}") from error
    return warnings


def _component(checkpoint: Checkpoint) -> str:
    return "ema" if "ema" in checkpoint.components else "model"
