"""Language models of checkpoints, a GPT or a model of transformers."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instar.checkpoint.inspect import check_shapes
from instar.checkpoint.manifest import CheckpointError, read_manifest
from instar.checkpoint.store import Checkpoint, check_finite, load_checkpoint
from instar.checkpoint.tensor_file import Outline
from instar.models.gpt import GPT, load_gpt
from instar.models.hf import CONFIG, encode_json_file
from instar.models.hf.module import PretrainedModel, class_name
from instar.models.hf.pretrained import LoraShape
from instar.models.hf.pretrained_folder import FilePart, file_parts
from instar.models.hf.tensors import merged_weight
from instar.models.hf.tokenizer import companion_files, with_chat
from instar.models.shape import ArchitectureError


def load_language_model(path: Path, device: str = "cpu") -> GPT | PretrainedModel:
    """Return the model of a checkpoint in evaluation mode; its moving average if there is one.

    Raises:
        CheckpointError: the checkpoint is damaged, or no language model that is known here.
    """
    if not is_of_transformers(read_manifest(path).architecture):
        return load_gpt(path, device)
    checkpoint = load_checkpoint(path)
    component = checkpoint.weights
    model = PretrainedModel(pretrained_shape(checkpoint, component))
    tensors = checkpoint.tensors(component)
    check_finite(path, tensors)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    return model.to(device).eval()


def is_of_transformers(architecture: Mapping[str, Any]) -> bool:
    """Return whether an architecture of a manifest is that of a model of transformers."""
    return "model_type" in architecture


def pretrained_shape(checkpoint: Checkpoint, component: str) -> LoraShape:
    """Return the shape of a checkpoint of a model of transformers.

    Raises:
        CheckpointError: it is unknown, or not that of the tensors.
    """
    path, entries = checkpoint.path, checkpoint.layout(component).entries
    try:
        shape = LoraShape.from_dict(checkpoint.manifest.architecture)
    except ArchitectureError as error:
        raise CheckpointError(f"{path}: no model that this Instar knows:\n{error}") from error
    # a manifest may claim any size: make nothing before the header of the file agrees
    if shape.sizes()["layers"] > len(entries):
        raise CheckpointError(f"{path}: more layers than tensors")
    check_shapes(path, entries, {name: e.shape for name, e in shape.parameters().items()})
    return shape


@dataclass(frozen=True)
class PretrainedExport:
    """A model of transformers as `save_pretrained` writes it, with the files that came with it."""

    arch: LoraShape
    run: Path

    def outlines(self, file_outlines: Mapping[str, Outline]) -> dict[str, Outline]:
        """Return the tensors of the files, for those of the checkpoint."""
        return {
            name: Outline(file_outlines[slot.parameter].dtype, slot.shape)
            for name, slot in self._slots()
        }

    def conversions(self, weights: Mapping[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
        """Return what makes each tensor of the files; adapters are merged into their weights."""

        def part(slot: FilePart) -> Tensor:
            return merged_weight(self.arch, weights, slot.parameter)[slot.index].contiguous()

        return {name: partial(part, slot) for name, slot in self._slots()}

    def files(self) -> dict[str, bytes]:
        """Return the config, and the files of the run that belong to the model."""
        config = {
            **self.arch.without_adapters().to_dict(),
            "architectures": [class_name(self.arch)],
            "dtype": "float32",
        }
        return with_chat({CONFIG: encode_json_file(config), **companion_files(self.run)}, self.run)

    def _slots(self) -> ItemsView[str, FilePart]:
        split = self.arch.family.single_experts is not None
        return file_parts(self.arch.without_adapters(), single_experts=split).items()
