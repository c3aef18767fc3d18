"""Folders of transformers' GPT-2 and Llama: export and import.

`export_folder` and `import_folder` write and read the folder that `from_pretrained` loads::

    config.json  model.safetensors              the model; or model-<i>-of-<n>.safetensors, with an index
    tokenizer.json  tokenizer_config.json       its tokenizer, if the run has one

Only safetensors and JSON are read and written; transformers is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, ItemsView, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instar.checkpoint.layout import Parts, check_shapes
from instar.checkpoint.manifest import CheckpointError, Facts
from instar.checkpoint.store import Checkpoint, CheckpointContent, publish_checkpoint
from instar.checkpoint.tensor_file import Outline, outlines, outlines_of
from instar.config.language import DataConfig, LanguageConfig
from instar.config.origins import config_text
from instar.data.text.foreign.special_tokens import TOKENIZER_CONFIG
from instar.data.text.tokenizer import (
    TOKENIZER_FILE,
    BPETokenizer,
    Tokenizer,
    load_saved_tokenizer,
    named_tokenizer,
    tokenizer_files,
)
from instar.models.architecture import Architecture, section_of
from instar.models.hf import CONFIG, encode_json_file
from instar.models.hf.config import from_config, read_config, style_of, to_config
from instar.models.hf.module import class_name, is_of_transformers, pretrained_shape
from instar.models.hf.peft import write_adapter
from instar.models.hf.pretrained import LoraShape, PretrainedShape
from instar.models.hf.pretrained_folder import FilePart, file_parts, open_folder
from instar.models.hf.tensors import conversions, from_tensors, merged_weight, to_tensors
from instar.models.hf.tokenizer import (
    as_trained,
    companion_files,
    exported_companions,
    from_fast,
    imported_companions,
    to_fast,
)
from instar.models.hf.weights import MAX_SHARD_BYTES, read_weights, write_weights
from instar.models.shape import ArchitectureError
from instar.record import atomic
from instar.record.atomic import atomic_dir, check_new
from instar.record.progress import folder_bytes, progress
from instar.record.rundir import RunDir
from instar.record.start_folder import paths_folder


def export_folder(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    averaged: bool = False,
    weights: Mapping[str, Tensor] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Architecture | PretrainedShape:
    """Write the model of a checkpoint, or the moving average of its weights, as a folder that
    `from_pretrained` loads. The folder is published atomically. One tensor at a time is in memory.

    Args:
        weights: other weights of the same model, e.g. those of another step.
        max_shard_bytes: largest file of weights, unless a single tensor is larger.

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
    run = path.absolute().parent.parent
    if is_of_transformers(checkpoint.manifest.architecture):
        shape = pretrained_shape(checkpoint, component)
        parts: _GPTExport | _PretrainedExport = _PretrainedExport(shape, run)
    else:
        parts = _GPTExport(_gpt_of(checkpoint), run)
    arch = parts.arch
    with ExitStack() as stack:
        shapes = {name: entry.shape for name, entry in arch.parameters().items()}
        if weights is None:
            read = stack.enter_context(checkpoint.reading(component))
            check_shapes(path, read.layout.entries, shapes)
            file_outlines = outlines(read.layout)
            weights = Parts(read, file_outlines, lambda _: None)
        else:
            file_outlines = outlines_of(weights)
            _check_other(path, file_outlines, shapes, checkpoint.manifest.buffers)
        tensor_outlines = parts.outlines(file_outlines)
        size = sum(outline.size_bytes for outline in tensor_outlines.values())
        temporary = stack.enter_context(atomic_dir(folder))
        bytes_written = partial(folder_bytes, temporary)
        stack.enter_context(progress(f"writing {folder}", size, measure=bytes_written))
        write_weights(temporary, tensor_outlines, parts.conversions(weights), max_shard_bytes)
        for name, content in parts.files().items():
            atomic.write_synced(temporary / name, content)
    return arch


BASE = "base"
"""folder of the base model in that of an adapter, where it is written too"""
_WITH_BASE = "--with-base writes the model under the adapters into the folder, too"


def export_adapter(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    averaged: bool = False,
    with_base: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write the adapters of a model of transformers as a folder that `PeftModel.from_pretrained` loads.

    Args:
        with_base: write the model that they are for into the folder `base` within; otherwise it is the folder that the
            run began from, whose weights must be those under the adapters.

    Returns:
        The model that they are for.

    Raises:
        CheckpointError: the model has no adapters that peft could have, or the base has other weights.
        WriteError: the folder cannot be written or is not empty.
    """
    check_new(folder)
    component = "ema" if averaged else "model"
    path = checkpoint.path
    if not is_of_transformers(checkpoint.manifest.architecture):
        raise CheckpointError(
            f"{path}: peft adds adapters to models of transformers, and this is a GPT: --to hf merges them"
        )
    if component not in checkpoint.components:
        raise CheckpointError(f"{path}: no moving average was kept (train.ema)")
    shape, run = pretrained_shape(checkpoint, component), path.absolute().parent.parent
    base = folder / BASE if with_base else _base_of(checkpoint)
    plain = _PretrainedExport(shape.without_adapters(), run)
    with ExitStack() as stack:
        read = stack.enter_context(checkpoint.reading(component))
        weights = Parts(read, outlines(read.layout), lambda _: None)
        if not with_base:
            _check_base(base, shape, weights)
        temporary = stack.enter_context(atomic_dir(folder))
        if with_base:
            (temporary / BASE).mkdir()
            tensor_outlines = plain.outlines(outlines(read.layout))
            conversions_of = plain.conversions(weights)
            write_weights(temporary / BASE, tensor_outlines, conversions_of, max_shard_bytes)
            for name, content in plain.files().items():
                atomic.write_synced(temporary / BASE / name, content)
        write_adapter(temporary, shape, weights, str(base.absolute()))
        for name, content in plain.files().items():
            if name != CONFIG:
                atomic.write_synced(temporary / name, content)
    return base


def _base_of(checkpoint: Checkpoint) -> Path:
    """Return the folder of transformers that the run of a checkpoint began from.

    Raises:
        CheckpointError: it began otherwise.
    """
    config, run = checkpoint.manifest.config, RunDir(checkpoint.path.absolute().parent.parent)
    start = config.get("model.from")
    folder = paths_folder(run, config) / str(start)
    if not start or not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{checkpoint.path}: there is no folder of transformers that its run began from; {_WITH_BASE}"
        )
    return folder


def _check_base(base: Path, shape: LoraShape, weights: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless a folder's model has the weights under the adapters."""
    opened = open_folder(base)
    names = list(shape.without_adapters().parameters())
    if [*opened.shape.parameters()] != names:
        raise CheckpointError(f"{base}: another model than that under the adapters; {_WITH_BASE}")
    with opened.reading() as read:
        for name in names:
            theirs, ours = read(name), weights[name]
            if theirs.shape != ours.shape or not torch.equal(theirs.to(ours.dtype), ours):
                raise CheckpointError(
                    f"{base}: {shape.module_name(name)} is not that under the adapters, which has been trained or grown "
                    f"since; {_WITH_BASE}"
                )


def _check_other(
    path: Path,
    file_outlines: Mapping[str, Outline],
    shapes: Mapping[str, tuple[int, ...]],
    buffers: Collection[str],
) -> None:
    """Check that other weights are those of a checkpoint's model.

    Raises:
        CheckpointError: a tensor is missing, unknown, or has another shape.
    """
    problems = [
        f"{name} must have the shape {shape}, and {file_outlines[name].shape if name in file_outlines else 'is missing'}"
        for name, shape in shapes.items()
        if name not in file_outlines or tuple(file_outlines[name].shape) != tuple(shape)
    ]
    problems += [
        f"{name} is unknown" for name in file_outlines if name not in shapes and name not in buffers
    ]
    if problems:
        raise CheckpointError(
            f"the weights are not of the model of {path}: {'; '.join(problems[:3])}; name a checkpoint of the "
            "same architecture"
        )


@dataclass(frozen=True)
class _GPTExport:
    """A GPT as GPT-2 or Llama."""

    arch: Architecture
    run: Path

    def outlines(self, file_outlines: Mapping[str, Outline]) -> dict[str, Outline]:
        """Return the tensors of the files, for those of the checkpoint."""
        without_memory = {
            name: torch.empty(outline.shape, dtype=outline.dtype, device="meta")
            for name, outline in file_outlines.items()
        }
        return outlines_of(to_tensors(self.arch, without_memory))

    def conversions(self, weights: Mapping[str, Tensor]) -> Mapping[str, Callable[[], Tensor]]:
        """Return what makes each tensor of the files."""
        return conversions(self.arch, weights)

    def files(self) -> dict[str, bytes]:
        """Return all other files: the config and the tokenizer's."""
        files, ids = exported_companions(self.run)
        has_tokenizer = (self.run / TOKENIZER_FILE).is_file()
        tokenizer = load_saved_tokenizer(self.run) if has_tokenizer else None
        if tokenizer is not None:
            if not files:
                about = _tokenizer_config(tokenizer, self.arch)
                files[TOKENIZER_CONFIG] = encode_json_file(about)
            files[TOKENIZER_FILE] = to_fast(tokenizer).encode()
        end = tokenizer.end_id if tokenizer is not None else None
        config = to_config(self.arch, end_id=end)
        if tokenizer is not None and tokenizer.before.size == 1:
            config["bos_token_id"] = int(tokenizer.before[0])
        config |= ids
        return as_trained({**files, CONFIG: encode_json_file(config)}, self.run)


@dataclass(frozen=True)
class _PretrainedExport:
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
        return as_trained({CONFIG: encode_json_file(config), **companion_files(self.run)}, self.run)

    def _slots(self) -> ItemsView[str, FilePart]:
        split = self.arch.family.single_experts is not None
        return file_parts(self.arch.without_adapters(), single_experts=split).items()


def _gpt_of(checkpoint: Checkpoint) -> Architecture:
    try:
        arch = Architecture.from_dict(checkpoint.manifest.architecture)
    except ArchitectureError as error:
        raise CheckpointError(
            f"{checkpoint.path}: not a GPT that is supported here:\n{error}"
        ) from error
    style_of(arch)
    return arch


def import_folder(folder: Path, run_dir: Path, *, tokenizer: str | None = None) -> Path:
    """Create a run with one checkpoint, at step 0, from a folder that transformers saved.

    Args:
        tokenizer: of a folder that has none: ``byte``, or the path of one.

    Returns:
        the path of the checkpoint.

    Raises:
        CheckpointError: the folder holds no GPT-2 or Llama in safetensors, or no tokenizer and none is named.
        WriteError: `run_dir` cannot be written or is not empty.
        ConfigError: the tokenizer cannot be read.
    """
    check_new(run_dir)
    foreign = read_config(folder)
    arch = from_config(foreign)
    try:
        model = section_of(arch)
    except ArchitectureError as error:
        raise CheckpointError(f"{CONFIG}: no run could have this shape: {error}") from error
    tensors = from_tensors(arch, read_weights(folder))
    read = _read_tokenizer(folder, arch, tokenizer)
    config = LanguageConfig(
        name=name_of_run(run_dir), model=model, data=_data_section(read, run_dir)
    )
    origins = {f"model.{field}": f"{folder.name}/{CONFIG}" for field in model.model_fields_set}
    size = sum(tensor.nbytes for tensor in tensors.values())
    with (
        atomic_dir(run_dir) as temporary,
        progress(f"writing {run_dir}", size, measure=lambda: folder_bytes(temporary)),
    ):
        run = RunDir(temporary)
        run.await_start()
        for name, content in (tokenizer_files(read) | imported_companions(folder, foreign)).items():
            atomic.write_synced(temporary / name, content)
        atomic.write_synced(run.config, config_text(config, origins).encode())
        facts = Facts(
            tokenizer=read.fingerprint,
            reason=f"imported from {folder.name}",
            left_out=["optimizer", "rng"],
        )
        checkpoint = publish_checkpoint(
            temporary, 0, CheckpointContent({"model": tensors}, {}, arch.to_dict(), facts=facts)
        )
    return RunDir(run_dir).checkpoints / checkpoint.name


def _tokenizer_config(tokenizer: Tokenizer, arch: Architecture) -> dict[str, Any]:
    token = tokenizer.end_token
    end = {} if token is None else {"bos_token": token, "eos_token": token}
    if isinstance(tokenizer, BPETokenizer) and tokenizer.bos:
        end["bos_token"] = tokenizer.bos
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": arch.context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # text never becomes a special token
        **end,
    }


def _read_tokenizer(folder: Path, arch: Architecture, tokenizer_name: str | None) -> Tokenizer:
    file = folder / TOKENIZER_FILE
    if file.is_file():
        if tokenizer_name is not None:
            raise CheckpointError(
                f"{file}: the folder has a tokenizer; --tokenizer is for those without"
            )
        tokenizer = from_fast(load_saved_tokenizer(folder))
    elif tokenizer_name is None or (other := named_tokenizer(tokenizer_name)) is None:
        raise CheckpointError(
            f"{folder}: no {TOKENIZER_FILE}, and nothing says which tokens the model has learned; "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes it, or name "
            "one by --tokenizer (a file, or byte)"
        )
    else:
        tokenizer = other
    if tokenizer.vocab_size > arch.vocab_size:
        raise CheckpointError(
            f"{file if tokenizer_name is None else tokenizer_name}: {tokenizer.vocab_size} tokens, but the model's table has "
            f"{arch.vocab_size} rows"
        )
    return tokenizer


def _data_section(tokenizer: Tokenizer, run_dir: Path) -> DataConfig:
    """Return the data section with the run's own tokenizer."""
    if tokenizer.kind == "byte":
        return DataConfig()
    return DataConfig(tokenizer=str(run_dir / TOKENIZER_FILE))


def name_of_run(run_dir: Path) -> str:
    """Return the name of a run that is imported into this folder."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.resolve().name).lstrip("-._")
    return name or "imported"
