"""Reads the weights that a run starts from, see `start`, and loads them into its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from instar.checkpoint.inspect import check_shapes
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import Checkpoint, check_finite, load_checkpoint
from instar.config.fields import LANGUAGE
from instar.models.architecture import Architecture
from instar.models.hf.pretrained_folder import open_folder
from instar.models.hf.tensors import from_tensors, merge_adapters
from instar.models.hf.weights import read_weights
from instar.run.optim.optimizer import copy_tensors
from instar.run.origin.init_weights import Weights
from instar.run.start.restore import load_model_state

_POSITIONS = "position_embedding.weight"


@dataclass(frozen=True)
class OpenedWeights:
    """Values of a new model's parameters, and the checkpoint that its buffers are in, if it has any."""

    tensors: Mapping[str, Tensor]
    """may be read when they are asked for"""
    checkpoint: Checkpoint | None = None

    def load_into(self, model: Module) -> list[str]:
        """Load them into a new model; return warnings about buffers that one of them lacks."""
        parameters = dict(model.named_parameters())
        if self.checkpoint is None:
            copy_tensors(parameters, self.tensors)
            return []
        try:
            warnings = load_model_state(model, self.checkpoint)
            copy_tensors(parameters, {name: self.tensors[name] for name in parameters})
        except (AttributeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{self.checkpoint.path}: of another model: {error}") from error
        return warnings


class _Saved(Mapping[str, Tensor]):
    """The tensors of a component, each read when it is asked for."""

    def __init__(
        self, checkpoint: Checkpoint, component: str, positions: int | None = None
    ) -> None:
        """`positions`: as many rows of the table of positions are read; None: all."""
        self._checkpoint, self._component, self._positions = checkpoint, component, positions
        self._names = list(checkpoint.layout(component).entries)

    def __getitem__(self, name: str) -> Tensor:
        with self._checkpoint.reading(self._component) as read:
            if name == _POSITIONS and self._positions is not None:
                return read.rows(name, 0, self._positions)
            return read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def open_weights(weights: Weights, architecture: Any) -> OpenedWeights:
    """Open weights, of a checkpoint the moving average if it has one, and check them.

    Args:
        architecture: of the new model; of a GPT, it may have a shorter context than the weights.

    Raises:
        CheckpointError: the weights are damaged, of another model than they say, or not finite.
    """
    if weights.task != LANGUAGE and not weights.is_hf:
        checkpoint = load_checkpoint(weights.path)
        return OpenedWeights(_Saved(checkpoint, checkpoint.weights), checkpoint)
    tensors: Mapping[str, Tensor]
    if weights.task == LANGUAGE:
        tensors = _gpt(weights, architecture.context)
    else:
        with open_folder(weights.path).reading() as read:
            tensors = {name: read(name) for name in architecture.parameters()}
    check_finite(weights.path, tensors, hint="")
    return OpenedWeights(tensors)


def _gpt(weights: Weights, context: int) -> Mapping[str, Tensor]:
    """Return the parameters of a GPT without adapters, with as many positions as `context` needs."""
    shape = Architecture.from_dict(weights.architecture)
    if weights.is_hf:
        tensors = from_tensors(shape, read_weights(weights.path))
    else:
        checkpoint = load_checkpoint(weights.path)
        component = checkpoint.weights
        shapes = {name: entry.shape for name, entry in shape.parameters().items()}
        check_shapes(checkpoint.path, checkpoint.layout(component).entries, shapes)
        if not shape.lora:
            return _Saved(checkpoint, component, context)
        tensors = merge_adapters(shape, _Saved(checkpoint, component))
    if _POSITIONS in tensors:
        tensors[_POSITIONS] = tensors[_POSITIONS][:context]
    return tensors
