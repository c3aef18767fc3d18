"""Interchange with transformers: GPT-2 and Llama, their config, tensors, tokenizers and folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = "config.json"


def is_pretrained(folder: Path) -> bool:
    """Return whether a folder is one that transformers saved, and not a run or a checkpoint."""
    return (folder / CONFIG).is_file()


def encode_json_file(value: Mapping[str, Any]) -> bytes:
    """Return a JSON object as transformers' files have it."""
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
