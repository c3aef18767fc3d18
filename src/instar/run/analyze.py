"""A saved model looked at: growth/analysis.py over a checkpoint, its run's data and an earlier one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instar.checkpoint.manifest import Manifest, read_manifest
from instar.checkpoint.store import checkpoints, load
from instar.config.errors import ConfigError
from instar.config.language import LanguageConfig
from instar.config.load import load as load_config
from instar.data.dataset import open_data
from instar.growth.analysis import Analysis, analyze
from instar.models.saved import load_gpt
from instar.record.rundir import RunDir
from instar.run.step import to_device

SAMPLES = 8
"""held-out samples that heads attend over"""


@dataclass(frozen=True)
class CheckpointAnalysis:
    """An analysis, and of what."""

    path: Path
    against: Path | None
    analysis: Analysis

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        against = None if self.against is None else str(self.against)
        return {"path": str(self.path), "against": against, **self.analysis.to_dict()}


def analyze_checkpoint(path: Path, against: Path | None = None) -> CheckpointAnalysis:
    """Look at the weights of a checkpoint, and at what they became since another one.

    Args:
        against: None: the one that was saved before it, if there is one.

    Raises:
        CheckpointError: one of them is broken, or is not of a GPT.
    """
    against = against or _saved_before(path)
    model = load_gpt(path)
    manifest = read_manifest(path)
    before = steps = None
    if against is not None:
        earlier = load(against)
        # a moving average is held against an average
        component = "ema" if "ema" in earlier.components else "model"
        before = earlier.tensors(component)
        steps = manifest.step - earlier.manifest.step
    tokens_BT, reason = _held_out(path, manifest, model.arch.context)
    found = analyze(model, tokens_BT=tokens_BT, before=before, steps=steps, no_tokens=reason)
    return CheckpointAnalysis(path, against, found)


def _saved_before(path: Path) -> Path | None:
    there = checkpoints(path.absolute().parent.parent)
    names = [each.name for each in there]
    at = names.index(path.name) if path.name in names else 0
    return there[at - 1] if at else None


def _held_out(path: Path, manifest: Manifest, context: int) -> tuple[Tensor | None, str]:
    """Samples (B, T) of the run's validation split, or why there are none."""
    config = RunDir(path.absolute().parent.parent).config
    if not config.is_file():
        return None, "the checkpoint lies in no run"
    try:
        run = load_config(str(config)).config
        if not isinstance(run, LanguageConfig):
            return None, f"of a run of task {run.task}"
        dataset = open_data(run.data, run.seed)
        if manifest.data and dataset.fingerprint != manifest.data:
            return None, f"{dataset.path} is not what the run was trained on"
        windows = dataset.held_out("val", context)
    except ConfigError as error:
        return None, str(error.problems[0])
    whole = max(1, len(windows) - 1)  # the last may be ragged
    chosen = np.linspace(0, whole - 1, min(SAMPLES, whole)).astype(np.int64)
    return to_device(windows.read(chosen), torch.device("cpu"))["inputs"], ""
