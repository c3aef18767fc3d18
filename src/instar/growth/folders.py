"""Growth of folders of transformers' models on disk, of any size: one tensor at a time is in memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from instar.checkpoint.manifest import CheckpointError, read_json
from instar.checkpoint.tensor_file import Outline
from instar.config.files import read_regular
from instar.config.sections import Operation
from instar.data.text.tokenizer import TOKENIZER_FILE
from instar.growth.apply import GrowthStep, Read, TensorReader, grow_parameters, moments_mode
from instar.growth.live.probe import drawn, probed
from instar.growth.live.vocabulary import with_vocabulary
from instar.growth.offline import (
    GrowthStage,
    OfflineGrowth,
    as_config_error,
    check_proof,
    expected_plan,
    stage,
    verify_written,
)
from instar.growth.operators import plan
from instar.growth.plan import VocabularyMap
from instar.growth.proof import Proof, prove
from instar.models.hf import CONFIG
from instar.models.hf.pretrained import PretrainedShape
from instar.models.hf.pretrained_folder import FilePart, PretrainedFolder, file_parts, open_folder
from instar.models.hf.tokenizer import COMPANIONS
from instar.models.hf.weights import MAX_SHARD_BYTES, encode, write_weights
from instar.models.shape import count_parameters
from instar.record import atomic
from instar.record.atomic import atomic_dir, check_new
from instar.record.progress import folder_bytes, progress

GENERATION = "generation_config.json"
PROOF_BYTES = 2 * 10**9
"""Up to this size of both models in float32, their outputs are compared unless the caller declines."""
_KEPT_TENSORS = 2
"""parameters of which several tensors of a file are made: gates with ups, and downs"""


def grow_folder(
    source: PretrainedFolder,
    out: Path,
    operations: Sequence[Operation],
    *,
    check: bool | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    seed: int = 0,
) -> OfflineGrowth:
    """Creates the folder `out`: the model of `source` after the operations, for `from_pretrained`.

    New values are those of `instar.growth.grow` with the same seed. The folder is published whole or not at all.

    Args:
        check: compare the outputs of both models, and write nothing unless the labels hold; default: if both fit in
            `PROOF_BYTES`.
        max_shard_bytes: largest file of weights, unless a single tensor is larger.

    Raises:
        ConfigError: an operation is not possible for this model.
        CheckpointError: a tensor cannot be read.
        WriteError: `out` cannot be written or is not empty.
        NotProven: a label does not hold.
    """
    begun = time.perf_counter()
    check_new(out)
    planned = _planned(source, operations, seed)
    stages, shape = planned.stages, planned.shape
    before = count_parameters(source.shape).total
    size = 4 * (before + stages[-1].parameters)
    proof, warning = None, ""
    if check is None and size > PROOF_BYTES:
        warning = f"outputs were not compared: both models take {size / 1e9:.1f} GB; --check does"
    with (
        source.reading() as read,
        atomic_dir(out) as temporary,
    ):
        grown = grow_parameters(planned.steps, TensorReader(source.outlines, read))
        # new experts are written as published models have them
        single = source.single_experts or "experts" not in source.shape.sizes()
        made, make = _file_tensors(shape, grown, single_experts=single)
        total = sum(outline.size_bytes for outline in made.values())
        with progress(f"writing {out}", total, measured=lambda: folder_bytes(temporary)):
            write_weights(temporary, made, make, max_shard_bytes)
        _copy_files(source.path, planned, temporary)
        atomic.write_synced(temporary / CONFIG, encode(source.config_of(shape)))
        if check or (check is None and not warning):
            written = open_folder(temporary)
            with written.reading() as read_written:
                verify_written(read_written, grown, out)
            proof = _prove(source, written, stages)
            check_proof(proof, stages, out, "random tokens")
    seconds = time.perf_counter() - begun
    checked_on = "random tokens" if proof else ""
    return OfflineGrowth(out, before, stages, proof, seconds, warning, checked_on)


@dataclass(frozen=True)
class _Planned:
    steps: tuple[GrowthStep, ...]
    stages: tuple[GrowthStage, ...]
    shape: PretrainedShape
    tokenizer: Path
    """folder of the grown model's"""
    vocabularies: tuple[VocabularyMap, ...]
    """of operations with a new tokenizer"""


def _planned(source: PretrainedFolder, operations: Sequence[Operation], seed: int) -> _Planned:
    steps, stages, vocabularies = list[GrowthStep](), list[GrowthStage](), list[VocabularyMap]()
    shape, tokenizer = source.shape, source.path
    for operation in operations:
        key = (seed, count_parameters(shape).total)
        with as_config_error():
            exact = with_vocabulary(operation, tokenizer)
            shape, made = plan(shape, exact)
        if isinstance(exact.value, VocabularyMap):
            tokenizer = Path(operation.value["tokenizer"])
            vocabularies.append(exact.value)
        steps.append(GrowthStep(made, shape.parameters(), key, moments_mode(operation)))
        stages.append(stage(operation, made, shape))
    return _Planned(tuple(steps), tuple(stages), shape, tokenizer, tuple(vocabularies))


def _file_tensors(
    shape: PretrainedShape, grown: TensorReader, *, single_experts: bool
) -> tuple[dict[str, Outline], dict[str, Callable[[], Tensor]]]:
    """Returns the tensors of the files of a grown model, and what makes each."""
    read = _Kept(grown.read)
    made: dict[str, Outline] = {}
    make: dict[str, Callable[[], Tensor]] = {}
    for name, part in file_parts(shape, single_experts=single_experts).items():
        made[name] = Outline(grown.outlines[part.parameter].dtype, part.shape)
        make[name] = partial(_part, read if part.index else grown.read, part)
    return made, make


def _part(read: Read, part: FilePart) -> Tensor:
    whole = read(part.parameter)
    return whole[part.index] if part.index else whole


class _Kept:
    """Reads parameters and keeps the last, of which many tensors of a file are made."""

    def __init__(self, read: Read) -> None:
        self._read, self._tensors = read, OrderedDict[str, Tensor]()

    def __call__(self, name: str) -> Tensor:
        if name not in self._tensors:
            while len(self._tensors) >= _KEPT_TENSORS:
                self._tensors.popitem(last=False)
            self._tensors[name] = self._read(name)
        return self._tensors[name]


def _copy_files(folder: Path, planned: _Planned, to: Path) -> None:
    for name in (TOKENIZER_FILE, *COMPANIONS):
        path = (folder if name == GENERATION else planned.tokenizer) / name
        try:
            content = read_regular(path, follow=True)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        atomic.write_synced(to / name, content)
    if planned.vocabularies and (to / GENERATION).exists():
        settings = read_json(to / GENERATION)
        for vocabulary in planned.vocabularies:
            settings |= vocabulary.special_ids(settings)
        atomic.write_synced(to / GENERATION, encode(settings))


def _prove(
    before: PretrainedFolder, after: PretrainedFolder, stages: Sequence[GrowthStage]
) -> Proof:
    """Compares both models in float32: only the rounding of the weights remains."""
    batch = drawn(before.shape, after.shape)
    return prove(
        expected_plan(stages),
        lambda: (probed(_loaded(before), batch), probed(_loaded(after), batch)),
        {outline.dtype for outline in after.outlines.values()},
    )


def _loaded(folder: PretrainedFolder) -> Module:
    """Returns the model of a folder in float32. Its config is the completed one, not that of the file."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values: dict[str, Any] = folder.shape.to_dict()
    config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    with torch.random.fork_rng(devices=[]):
        model: Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad(), folder.reading() as read:
        for name, parameter in model.named_parameters():
            parameter.copy_(read(folder.shape.name(name)))
    return model
