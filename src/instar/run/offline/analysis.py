"""Analysis of a checkpoint on disk, of any task. It runs no user code: a checkpoint describes its own
tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from instar.checkpoint.listing import list_checkpoints
from instar.checkpoint.manifest import Manifest, read_manifest
from instar.checkpoint.store import Checkpoint, load_checkpoint
from instar.checkpoint.tensor_file import outlines
from instar.config.errors import ConfigError
from instar.config.fields import values
from instar.config.language import CausalLMConfig, LanguageConfig
from instar.config.load import load_config
from instar.data.text.dataset import open_data
from instar.extensions import load_target, tasks
from instar.growth.analysis import (
    NO_ATTENTION,
    HeadEntropy,
    WeightAnalysis,
    analyze,
    attention_entropy,
)
from instar.models.architecture import Architecture
from instar.models.gpt import load_gpt
from instar.models.shape import ArchitectureError, Fixed, Parameter
from instar.record.rundir import RunDir
from instar.record.start_folder import paths_folder
from instar.run.resume import began_with, rewind_step
from instar.run.step.stepper import to_device
from instar.schedule.operations import effective, history_from_json

SAMPLES = 8
"""number of held-out samples for the entropy of attention heads"""


@dataclass(frozen=True)
class CheckpointAnalysis:
    """A weight analysis and the checkpoints that it is about."""

    path: Path
    against: Path | None
    analysis: WeightAnalysis

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        against = None if self.against is None else str(self.against)
        return {"path": str(self.path), "against": against, **self.analysis.to_dict()}


def analyze_checkpoint(path: Path, against: Path | None = None) -> CheckpointAnalysis:
    """Analyze the weights of a checkpoint, and their changes since an earlier one.

    Args:
        against: the earlier checkpoint; None: the one saved before `path`, if there is one.

    Raises:
        CheckpointError: a checkpoint is damaged.
    """
    against = against or _saved_before(path)
    checkpoint = load_checkpoint(path)
    manifest = checkpoint.manifest
    parameters = _parameter_table(checkpoint)
    before = steps = None
    if against is not None:
        earlier = load_checkpoint(against)
        # a moving average is compared with a moving average
        before = earlier.tensors(earlier.weights)
        steps = manifest.step - earlier.manifest.step
    heads, reason = _attention(path, manifest)
    analysis = analyze(
        checkpoint.tensors(checkpoint.weights),
        parameters,
        heads=heads,
        no_heads=reason,
        before=before,
        steps=steps,
    )
    return CheckpointAnalysis(path, against, analysis)


def _parameter_table(checkpoint: Checkpoint) -> Mapping[str, Parameter]:
    """Return the parameters of a checkpoint. If no built-in task has its architecture, every tensor
    with two or more dimensions counts as a matrix."""
    manifest = checkpoint.manifest
    saved_outlines = outlines(checkpoint.layout(checkpoint.weights))
    shapes = [load_target(task.shape).from_dict for task in tasks().values() if task.shape]
    for shape_of in (Architecture.from_dict, *shapes):
        try:
            parameters: Mapping[str, Parameter] = shape_of(manifest.architecture).parameters()
        except (ArchitectureError, KeyError, TypeError, ValueError):
            continue
        if {n: e.shape for n, e in parameters.items()} == {
            n: e.shape for n, e in saved_outlines.items()
        }:
            return parameters
    tensors = (
        (name, tensor.shape)
        for name, tensor in saved_outlines.items()
        if name not in manifest.buffers and tensor.dtype.is_floating_point
    )
    return Fixed(tuple(tensors)).parameters()


def _saved_before(path: Path) -> Path | None:
    paths = list_checkpoints(path.absolute().parent.parent)
    line = read_manifest(path).line or None
    names = [path.name for path in paths]
    at = names.index(path.name) if path.name in names else 0
    before = (path for path in reversed(paths[:at]) if rewind_step(path, line) is None)
    return next(before, None)


def _attention(path: Path, manifest: Manifest) -> tuple[tuple[HeadEntropy, ...], str]:
    """Return the entropy of attention heads over held-out samples, or why there is none."""
    folder = RunDir(path.absolute().parent.parent)
    if not folder.config.is_file():
        return (), "the checkpoint is not in the folder of a run"
    try:
        run, _ = effective(began_with(folder, manifest), history_from_json(manifest.history))
        if isinstance(run, CausalLMConfig):
            return (), "the attention of models of transformers is not analysed"
        if not isinstance(run, LanguageConfig):
            return (), NO_ATTENTION
        model = load_gpt(path)
        # the data's location may have changed since: take it from the current config
        config = load_config(str(folder.config), checks=(), import_task=False).config
        base, now = paths_folder(folder, values(config)), config.data.path
        place = str(base / now) if now and not base.samefile(".") else now
        dataset = open_data(run.data.model_copy(update={"path": place}), run.data_seed)
        if manifest.data and dataset.fingerprint != manifest.data:
            return (), f"{dataset.path} is not the data that the run was trained on"
        windows = dataset.held_out("val", model.arch.context)
    except ConfigError as error:
        return (), str(error.problems[0])
    except ValueError as error:
        return (), str(error)
    count = max(1, len(windows) - 1)  # the last may be shorter
    picked_positions = np.linspace(0, count - 1, min(SAMPLES, count)).astype(np.int64)
    batch = to_device(windows.read(picked_positions), torch.device("cpu"))
    return attention_entropy(model, batch["inputs"]), ""
