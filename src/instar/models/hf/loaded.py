"""Models as transformers itself loads them, from the files of a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from instar.checkpoint.manifest import CheckpointError


def load_published(folder: Path) -> Module:
    """Return the model that `from_pretrained` makes of a folder alone, in float32 and evaluation mode.

    The folder must be one that `open_folder` accepts: no code of it is run, and nothing is downloaded.

    Raises:
        CheckpointError: transformers cannot load it, or would draw or leave out tensors.
    """
    from transformers import AutoModelForCausalLM

    try:
        with _quiet(), torch.random.fork_rng(devices=[]):
            model_and_report: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:  # whatever transformers makes of a config of anyone's
        raise CheckpointError(f"{folder}: transformers cannot load it: {error}") from error
    model, report = model_and_report
    if odd := {what: names for what, names in report.items() if names}:
        differences = "; ".join(
            f"{what}: {sorted(map(str, names))[0]}" for what, names in odd.items()
        )
        raise CheckpointError(f"{folder}: transformers loads another model of it: {differences}")
    module: Module = model.eval()
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars that transformers shows while it loads."""
    from transformers.utils import logging

    bars_enabled: Any = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars_enabled:
            logging.enable_progress_bar()
