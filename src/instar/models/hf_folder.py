"""Checkpoints into folders that transformers loads, and such folders into runs.

```
config.json  model.safetensors                       the model
tokenizer.json  tokenizer_config.json                its tokenizer, where the run has one
```

Only safetensors and JSON are read and written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast
from torch import Tensor

from instar.checkpoint import disk
from instar.checkpoint.appearing import appearing, check_new
from instar.checkpoint.manifest import CheckpointError, Facts, read_json
from instar.checkpoint.store import Checkpoint, publish
from instar.config.dump import resolved
from instar.config.language import DataConfig, LanguageConfig, ModelConfig
from instar.data.tokenizer import (
    TOKENIZER_FILE,
    UNKNOWN,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    load_tokenizer,
)
from instar.models.architecture import Architecture, resolve
from instar.models.hf import from_config, to_config
from instar.models.hf_tensors import from_tensors, to_tensors
from instar.models.shape import ArchitectureError
from instar.record.rundir import RunDir

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def export_folder(checkpoint: Checkpoint, folder: Path, *, averaged: bool = False) -> Architecture:
    """Write the model of a checkpoint, or the moving average of its weights, as a folder that
    `from_pretrained` loads; the folder is there whole or not at all.

    Raises:
        CheckpointError: transformers has no such model, there is no average, or the folder
            cannot be written or is not empty.
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
        raise CheckpointError(f"{path}: not a GPT that is known here:\n{error}") from error
    run = path.absolute().parent.parent
    tokenizer = load_tokenizer(run) if (run / TOKENIZER_FILE).is_file() else None
    config = to_config(arch, end_id=tokenizer.end_id if tokenizer else None)
    tensors = to_tensors(arch, checkpoint.tensors(component))
    with appearing(folder) as aside:
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        disk.sync_file(aside / WEIGHTS)
        if tokenizer:
            disk.write_synced(aside / TOKENIZER_FILE, to_fast(tokenizer).encode())
            about = _tokenizer_config(tokenizer, arch)
            disk.write_synced(aside / "tokenizer_config.json", _json(about))
        disk.write_synced(aside / CONFIG, _json(config))
    return arch


def import_folder(folder: Path, run_dir: Path) -> Path:
    """Make a run of a folder that transformers saved, with one checkpoint, at step 0; its path.

    Raises:
        CheckpointError: the folder holds no GPT-2 or Llama in safetensors, or `run_dir` cannot
            be written or is not empty.
        ConfigError: the tokenizer cannot be read.
    """
    check_new(run_dir)
    arch = from_config(_read_config(folder))
    model = _model_section(arch)
    tensors = from_tensors(arch, _read_weights(folder))
    tokenizer = _read_tokenizer(folder, arch)
    config = LanguageConfig(name=_name(run_dir), model=model, data=_data_section(tokenizer))
    origins = {f"model.{field}": f"{folder.name}/{CONFIG}" for field in ModelConfig.model_fields}
    with appearing(run_dir) as aside:
        run = RunDir(aside)
        run.logs.mkdir()
        if tokenizer:
            disk.write_synced(aside / TOKENIZER_FILE, tokenizer.to_json().encode())
        disk.write_synced(run.config, resolved(config, origins).encode())
        facts = Facts(
            tokenizer=tokenizer.fingerprint if tokenizer else "",
            reason=f"imported from {folder.name}",
            left_out=["optimizer", "rng"],
        )
        made = publish(aside, 0, {"model": tensors}, {}, architecture=arch.to_dict(), facts=facts)
    return RunDir(run_dir).checkpoints / made.name


def to_fast(tokenizer: Tokenizer) -> str:
    """`tokenizer` in the JSON of the tokenizers library, encoding and decoding to the same ids."""
    if isinstance(tokenizer, ByteTokenizer):
        fast = Fast(models.BPE({_letter(byte): byte for byte in range(256)}, []))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
    elif isinstance(tokenizer, CharTokenizer):
        names = [*tokenizer.characters, UNKNOWN]
        ids = {name: number for number, name in enumerate(names)}
        fast = Fast(models.WordLevel(ids, unk_token=UNKNOWN))
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        fast.decoder = decoders.Fuse()
    else:
        return tokenizer.to_json()
    return str(fast.to_str())


def from_fast(tokenizer: Tokenizer) -> Tokenizer:
    """What `to_fast` made the JSON of `tokenizer` from, if it did; else `tokenizer` itself."""
    said = tokenizer.to_json()
    if not isinstance(tokenizer, BPETokenizer):
        return tokenizer
    if said == to_fast(ByteTokenizer()):
        return ByteTokenizer()
    if (vocabulary := json.loads(said)["model"]).get("type") == "WordLevel":
        names = sorted(vocabulary["vocab"], key=vocabulary["vocab"].__getitem__)
        chars = CharTokenizer("".join(names[:-1]))
        return chars if said == to_fast(chars) else tokenizer
    return tokenizer


def _letter(byte: int) -> str:
    """The character that byte-level tokenizers write for a byte, as in GPT-2: itself if it can
    be seen, else one from code point 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [each for each in range(256) if each not in seen]
    return chr(byte if byte in seen else 256 + hidden.index(byte))


def _tokenizer_config(tokenizer: Tokenizer, arch: Architecture) -> dict[str, Any]:
    token = tokenizer.end_token
    end = {} if token is None else {"bos_token": token, "eos_token": token}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": arch.context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # text is never taken for a special token
        **end,
    }


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder}: no {CONFIG}; import takes the folder that save_pretrained of a "
            "transformers model wrote"
        )
    return read_json(folder / CONFIG)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX).get("weight_map")
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


def _model_section(arch: Architecture) -> ModelConfig:
    """The config that resolves to `arch`."""
    fields = {
        field: value for field, value in arch.to_dict().items() if field in ModelConfig.model_fields
    }
    try:
        section = ModelConfig(**fields)
        again = resolve(section, 1)
    except (ValidationError, ArchitectureError) as error:
        raise CheckpointError(f"{CONFIG}: no run could have this shape: {error}") from error
    if differing := _differing(arch.to_dict(), again.to_dict()):
        raise CheckpointError(f"{CONFIG}: no run could have this shape: {differing}")
    return section


def _differing(wanted: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{field} is {wanted[field]}, a run's would be {made[field]}"
        for field in wanted
        if wanted[field] != made[field]
    )


def _data_section(tokenizer: Tokenizer | None) -> DataConfig:
    """The tokenizer that comes nearest; data made for it is still made with one of its own."""
    if tokenizer is None:
        return DataConfig()
    if tokenizer.kind != "bpe":
        return DataConfig.model_validate({"tokenizer": tokenizer.kind})
    return DataConfig(tokenizer="bpe", vocab_size=tokenizer.vocab_size)


def _name(run_dir: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.resolve().name).lstrip("-._")
    return name or "imported"


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
