"""A model back from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import load
from instar.models.architecture import Architecture
from instar.models.gpt import GPT
from instar.models.shape import ArchitectureError


def load_gpt(path: Path, device: str = "cpu") -> GPT:
    """The model in a checkpoint folder, in evaluation mode; its moving average if it kept one.

    Raises:
        CheckpointError: the checkpoint is broken, or is not of a GPT that this version knows.
    """
    checkpoint = load(path)
    try:
        architecture = Architecture.from_dict(checkpoint.manifest.architecture)
    except ArchitectureError as error:
        raise CheckpointError(f"{path}: not a GPT that this Instar knows:\n{error}") from error
    with torch.device("meta"):
        model = GPT(architecture)
    component = "ema" if "ema" in checkpoint.components else "model"
    model = model.to_empty(device=device)
    model.reset_buffers()
    try:
        model.load_state_dict(checkpoint.tensors(component, device))
    except RuntimeError as error:
        raise CheckpointError(
            f"{path}: the tensors do not fit the architecture: {error}"
        ) from error
    model.set_step(checkpoint.manifest.step)
    return model.eval()
