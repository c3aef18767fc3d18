"""Folders of transformers' GPT-2 and Llama: export, import, and reading their weights.

`export_folder` and `import_folder` write and read the folder that `from_pretrained` loads::

    config.json  model.safetensors              the model
    tokenizer.json  tokenizer_config.json       its tokenizer, if the run has one

Only safetensors and JSON are read and written; transformers is not needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from instar.checkpoint.manifest import CheckpointError, Facts, read_json
from instar.checkpoint.store import Checkpoint, publish
from instar.config.files import check_regular
from instar.config.language import DataConfig, LanguageConfig
from instar.config.origins import resolved
from instar.data.text.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from instar.models.architecture import Architecture, section_of
from instar.models.hf.config import CONFIG, from_config, read_config, to_config
from instar.models.hf.tensors import from_tensors, to_tensors
from instar.models.hf.tokenizer import from_fast, to_fast
from instar.models.shape import ArchitectureError
from instar.record import atomic
from instar.record.atomic import atomic_dir, check_new
from instar.record.progress import folder_bytes, progress
from instar.record.rundir import RunDir

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def export_folder(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    averaged: bool = False,
    weights: Mapping[str, Tensor] | None = None,
) -> Architecture:
    """Writes the model of a checkpoint, or the moving average of its weights, as a folder that
    `from_pretrained` loads. The folder is published atomically.

    Args:
        weights: other weights of the same model, e.g. those of another step.

    Raises:
        CheckpointError: transformers has no such model, or there is no average.
        WriteError: the folder cannot be written or is not empty.
        ConfigError: the run's tokenizer cannot be read.
    """
    check_new(folder)
    component = "ema" if averaged else "model"
    path = checkpoint.path
    if component not in checkpoint.components:
        missing = "no moving average was kept (train.ema)" if averaged else "its model is missing"
        raise CheckpointError(f"{path}: {missing}; it has {', '.join(checkpoint.components)}")
    try:
        arch = Architecture.from_dict(checkpoint.manifest.architecture)
    except ArchitectureError as error:
        raise CheckpointError(f"{path}: not a GPT that is supported here:\n{error}") from error
    run = path.absolute().parent.parent
    tokenizer = load_tokenizer(run) if (run / TOKENIZER_FILE).is_file() else None
    config = to_config(arch, end_id=tokenizer.end_id if tokenizer else None)
    tensors = to_tensors(arch, checkpoint.tensors(component) if weights is None else weights)
    with (
        atomic_dir(folder) as temporary,
        progress(f"writing {folder}", _bytes(tensors), measured=lambda: folder_bytes(temporary)),
    ):
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        atomic.adopt_file(temporary / WEIGHTS)
        if tokenizer:
            atomic.write_synced(temporary / TOKENIZER_FILE, to_fast(tokenizer).encode())
            about = _tokenizer_config(tokenizer, arch)
            atomic.write_synced(temporary / "tokenizer_config.json", _json(about))
        atomic.write_synced(temporary / CONFIG, _json(config))
    return arch


def import_folder(folder: Path, run_dir: Path) -> Path:
    """Creates a run with one checkpoint, at step 0, from a folder that transformers saved.

    Returns:
        the path of the checkpoint.

    Raises:
        CheckpointError: the folder holds no GPT-2 or Llama in safetensors.
        WriteError: `run_dir` cannot be written or is not empty.
        ConfigError: the tokenizer cannot be read.
    """
    check_new(run_dir)
    arch = from_config(read_config(folder))
    try:
        model = section_of(arch)
    except ArchitectureError as error:
        raise CheckpointError(f"{CONFIG}: no run could have this shape: {error}") from error
    tensors = from_tensors(arch, read_weights(folder))
    tokenizer = _read_tokenizer(folder, arch)
    config = LanguageConfig(
        name=_name(run_dir), model=model, data=_data_section(tokenizer, run_dir)
    )
    origins = {f"model.{field}": f"{folder.name}/{CONFIG}" for field in model.model_fields_set}
    with (
        atomic_dir(run_dir) as temporary,
        progress(f"writing {run_dir}", _bytes(tensors), measured=lambda: folder_bytes(temporary)),
    ):
        run = RunDir(temporary)
        run.logs.mkdir()
        if tokenizer:
            atomic.write_synced(temporary / TOKENIZER_FILE, tokenizer.to_json().encode())
        atomic.write_synced(run.config, resolved(config, origins).encode())
        facts = Facts(
            tokenizer=tokenizer.fingerprint if tokenizer else "",
            reason=f"imported from {folder.name}",
            left_out=["optimizer", "rng"],
        )
        made = publish(
            temporary, 0, {"model": tensors}, {}, architecture=arch.to_dict(), facts=facts
        )
    return RunDir(run_dir).checkpoints / made.name


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _tokenizer_config(tokenizer: Tokenizer, arch: Architecture) -> dict[str, Any]:
    token = tokenizer.end_token
    end = {} if token is None else {"bos_token": token, "eos_token": token}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": arch.context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # text never becomes a special token
        **end,
    }


def read_weights(folder: Path) -> dict[str, Tensor]:
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX, follow=True).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise CheckpointError(f"{folder / INDEX}: not an index of safetensors files")
        files = sorted(set(index.values()))
    elif (folder / WEIGHTS).is_file():
        files = [WEIGHTS]
    else:
        pickled = sorted(path.name for kind in _PICKLED for path in folder.glob(kind))
        if pickled:
            raise CheckpointError(
                f"{folder}: weights only as {', '.join(pickled)}, which may run any program when "
                "unpickled and is not opened; save the model again with save_pretrained, which "
                f"writes {WEIGHTS}"
            )
        raise CheckpointError(f"{folder}: no {WEIGHTS} and no {INDEX}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        if Path(file).name != file:
            raise CheckpointError(f"{folder / INDEX}: {file!r} is not a file of this folder")
        try:
            check_regular(folder / file, follow=True)
            tensors |= load_file(folder / file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / file}: {error}") from error
    return tensors


def _read_tokenizer(folder: Path, arch: Architecture) -> Tokenizer | None:
    if not (folder / TOKENIZER_FILE).is_file():
        return None
    tokenizer = from_fast(load_tokenizer(folder))
    if tokenizer.vocab_size > arch.vocab_size:
        raise CheckpointError(
            f"{folder / TOKENIZER_FILE}: {tokenizer.vocab_size} tokens, but the model's table has "
            f"{arch.vocab_size} rows; without this file the model is imported alone"
        )
    return tokenizer


def _data_section(tokenizer: Tokenizer | None, run_dir: Path) -> DataConfig:
    """Returns the data section with the run's own tokenizer."""
    if tokenizer is None or tokenizer.kind == "byte":
        return DataConfig()
    return DataConfig(tokenizer=str(run_dir / TOKENIZER_FILE))


def _name(run_dir: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.resolve().name).lstrip("-._")
    return name or "imported"


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
