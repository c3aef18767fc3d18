"""Interchange with transformers: GPT-2 and Llama, their config, tensors, tokenizers and folders."""

from __future__ import annotations

from pathlib import Path

CONFIG = "config.json"


def is_pretrained(folder: Path) -> bool:
    """Return whether a folder is one that transformers saved, and not a run or a checkpoint."""
    return (folder / CONFIG).is_file()
