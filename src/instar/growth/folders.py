"""Growth of folders of transformers' models on disk, of any size: one tensor at a time is in memory."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instar.checkpoint.manifest import CheckpointError, read_json
from instar.checkpoint.tensor_file import Outline
from instar.config.errors import InstarError
from instar.config.files import read_regular
from instar.config.sections import Operation
from instar.data.text.tokenizer import TOKENIZER_FILE
from instar.growth.apply import GrowthStep, Read, TensorReader, grow_parameters, moments_mode
from instar.growth.live.probe import draw_probe, run_probe, twin_of, write_twin
from instar.growth.live.vocabulary import with_vocabulary
from instar.growth.offline import (
    DiskGrowth,
    GrowthStage,
    NotProven,
    OfflineGrowth,
    PlannedGrowth,
    as_config_error,
    copies_warning,
    stage,
    write_and_prove,
)
from instar.growth.operators import plan
from instar.growth.plan import GrowthError, VocabularyMap
from instar.growth.proof import Probe, Proof
from instar.models.hf import CONFIG, encode_json_file
from instar.models.hf.config import explicit_config
from instar.models.hf.families import BUILT_IN
from instar.models.hf.module import load_published
from instar.models.hf.pretrained import PretrainedShape
from instar.models.hf.pretrained_folder import FilePart, PretrainedFolder, file_parts, open_folder
from instar.models.hf.tokenizer import COMPANIONS
from instar.models.hf.weights import MAX_SHARD_BYTES, write_weights
from instar.models.shape import ArchitectureError, Growable, count_parameters
from instar.record import atomic
from instar.record.atomic import atomic_dir, check_new
from instar.record.progress import folder_bytes, progress

GENERATION = "generation_config.json"
TOKENS = "random tokens"
"""on which outputs are compared, in words"""
PROOF_BYTES = 2 * 10**9
"""Up to this size of both models in float32, their outputs are compared unless the caller declines."""
SEED = 0
"""of new values, as that of `instar.growth.grow` by default"""
_KEPT_TENSORS = 2
"""parameters of which several tensors of a file are made: gates with ups, and downs"""


def grow_folder(
    source: PretrainedFolder,
    out: Path,
    operations: Sequence[Operation],
    *,
    check: bool | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> OfflineGrowth:
    """Create the folder `out`: the model of `source` after the operations, for `from_pretrained`.

    New values are those of `instar.growth.grow`. The folder is published whole or not at all.

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
    start = time.perf_counter()
    check_new(out)
    folder_plan = _plan_folder(source, operations)
    before = count_parameters(source.shape).total
    size = 4 * (before + folder_plan.stages[-1].parameters)
    proof, checked_on = None, ""
    warnings = [copies_warning(folder_plan, {})]  # a folder holds no states
    too_large = check is None and size > PROOF_BYTES
    if not check:
        try:
            check_own_family(source.shape, operations)
        except GrowthError as error:
            raise NotProven(str(error)) from error
    if too_large:
        proof, checked_on = _try_on_twin(source, folder_plan, operations, out)
        fallback = f"instead, {checked_on} was" if proof else f"nothing was, for {checked_on}"
        warnings.insert(
            0,
            f"both models take {size / 1e9:.1f} GB and were not compared: {fallback}; --check does",
        )
    compares = check or (check is None and not too_large)
    with source.reading() as read, atomic_dir(out) as temporary:
        places = temporary, out
        growth = _folder_growth(source, read, folder_plan, places, max_shard_bytes=max_shard_bytes)
        if compares:
            _, proof = write_and_prove(growth, check=True)
            checked_on = growth.checked_on
        else:
            growth.build()
    seconds = time.perf_counter() - start
    checked_on = checked_on if proof else ""
    warning = "; ".join(filter(None, warnings))
    return OfflineGrowth(out, before, folder_plan.stages, proof, seconds, warning, checked_on)


@dataclass(frozen=True)
class _PlannedFolder(PlannedGrowth):
    shapes: tuple[PretrainedShape, ...]
    tokenizer: Path
    """folder of the grown model's"""
    vocabularies: tuple[VocabularyMap, ...]
    """of operations with a new tokenizer"""


def _plan_folder(source: PretrainedFolder, operations: Sequence[Operation]) -> _PlannedFolder:
    steps, stages, vocabularies = list[GrowthStep](), list[GrowthStage](), list[VocabularyMap]()
    shapes = list[PretrainedShape]()
    shape, tokenizer = source.shape, source.path
    for operation in operations:
        key = (SEED, count_parameters(shape).total)
        with as_config_error():
            exact = with_vocabulary(operation, tokenizer)
            shape, growth_plan = plan(shape, exact)
        if isinstance(exact.value, VocabularyMap):
            tokenizer = Path(operation.value["tokenizer"])
            vocabularies.append(exact.value)
        steps.append(GrowthStep(growth_plan, shape.parameters(), key, moments_mode(operation)))
        shapes.append(shape)
        stages.append(stage(operation, growth_plan, shape))
    return _PlannedFolder(
        tuple(steps), tuple(stages), tuple(shapes), tokenizer, tuple(vocabularies)
    )


def _folder_growth(
    source: PretrainedFolder,
    read: Read,
    folder_plan: _PlannedFolder,
    places: tuple[Path, Path],
    checked_on: str = TOKENS,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> DiskGrowth[PretrainedFolder]:
    """Return what grows.

    Args:
        places: in which it is written, and that is to be made of it.
    """
    (folder, out), shape = places, folder_plan.shapes[-1]
    parameters = grow_parameters(folder_plan.steps, TensorReader(source.outlines, read))

    def build() -> PretrainedFolder:
        # new experts are written as published models have them
        single = source.single_experts or "experts" not in source.shape.sizes()
        outlines, make = _file_tensors(shape, parameters, single_experts=single)
        total = sum(outline.size_bytes for outline in outlines.values())
        with progress(f"writing {out}", total, measure=lambda: folder_bytes(folder)):
            write_weights(folder, outlines, make, max_shard_bytes)
        _copy_files(source.path, folder_plan, folder)
        atomic.write_synced(folder / CONFIG, encode_json_file(source.config_of(shape)))
        new_folder = open_folder(folder)
        _check_published(new_folder, shape)
        return new_folder

    def outputs(new_folder: PretrainedFolder) -> tuple[Probe, Probe]:
        """As transformers loads both, in float32: only the rounding of the weights remains."""
        batch = draw_probe(source.shape, shape)
        old, new = (
            run_probe(load_published(folder_read.path), batch)
            for folder_read in (source, new_folder)
        )
        return old, new

    def readers(new_folder: PretrainedFolder) -> Iterator[tuple[Read, TensorReader]]:
        with new_folder.reading() as read_published:
            yield read_published, parameters

    def dtypes(new_folder: PretrainedFolder) -> set[torch.dtype]:
        return {outline.dtype for outline in new_folder.outlines.values()}

    return DiskGrowth(folder_plan, out, checked_on, build, outputs, readers, dtypes)


def _file_tensors(
    shape: PretrainedShape, parameters: TensorReader, *, single_experts: bool
) -> tuple[dict[str, Outline], dict[str, Callable[[], Tensor]]]:
    """Return the tensors of the files of a grown model, and what makes each."""
    read = _Kept(parameters.read)
    outlines: dict[str, Outline] = {}
    make: dict[str, Callable[[], Tensor]] = {}
    for name, part in file_parts(shape, single_experts=single_experts).items():
        outlines[name] = Outline(parameters.outlines[part.parameter].dtype, part.shape)
        make[name] = partial(_part, read if part.index else parameters.read, part)
    return outlines, make


def _part(read: Read, part: FilePart) -> Tensor:
    parameter = read(part.parameter)
    return parameter[part.index] if part.index else parameter


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


def _copy_files(folder: Path, folder_plan: _PlannedFolder, to: Path) -> None:
    for name in (TOKENIZER_FILE, *COMPANIONS):
        path = (folder if name == GENERATION else folder_plan.tokenizer) / name
        try:
            content = read_regular(path, follow=True)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        atomic.write_synced(to / name, content)
    if folder_plan.vocabularies and (to / GENERATION).exists():
        settings = read_json(to / GENERATION)
        for vocabulary in folder_plan.vocabularies:
            settings |= vocabulary.special_ids(settings)
        atomic.write_synced(to / GENERATION, encode_json_file(settings))


def _check_published(folder: PretrainedFolder, planned_shape: PretrainedShape) -> None:
    """Raise CheckpointError unless the files are those of the planned model, as transformers reads their config."""
    read, expected = explicit_config(folder.shape.config), explicit_config(planned_shape.config)
    for key in expected.keys() - {"architectures"}:
        if not _contains(read.get(key), expected[key]):
            raise CheckpointError(
                f"{CONFIG}: transformers reads {key} as {read.get(key)!r}, and the grown model has {expected[key]!r}"
            )


def _contains(read: Any, expected: Any) -> bool:
    """Return whether a value is the other, or has its keys with their values."""
    if isinstance(read, Mapping) and isinstance(expected, Mapping):
        return all(_contains(read.get(key), value) for key, value in expected.items())
    return bool(read == expected)


def _try_on_twin(
    source: PretrainedFolder,
    folder_plan: _PlannedFolder,
    operations: Sequence[Operation],
    out: Path,
) -> tuple[Proof | None, str]:
    """Grow a small model of the same config in the same way, and compare that.

    Return the proof, and what was compared; without a small model None, and why.

    Raises:
        NotProven: the labels do not hold for the small model.
    """
    try:
        twin = twin_of((source.shape, *folder_plan.shapes), operations)
    except CheckpointError as error:
        return None, str(error)
    about = f"a small model of the same config ({twin.about})"
    with tempfile.TemporaryDirectory() as root:
        small, large = Path(root) / "small", Path(root) / "grown"
        large.mkdir()
        write_twin(twin.shape, small, single_experts=source.single_experts)
        for name in (TOKENIZER_FILE, *COMPANIONS):
            if (source.path / name).is_file():
                shutil.copy(source.path / name, small / name)
        folder = open_folder(small)
        narrow = _plan_folder(folder, twin.operations)
        with folder.reading() as read:
            checked_on = f"{TOKENS}, of {about},"
            growth = _folder_growth(folder, read, narrow, (large, out), checked_on)
            _, proof = write_and_prove(growth, check=True)
    return proof, about


def check_own_family(shape: Growable, operations: Iterable[Operation]) -> None:
    """Check that operations, one after the other, do to a model what the table of its family makes of their labels.

    A table that is wrong in its axes, heads or scales gives wrong labels, or folders that do not load. A
    narrow model of the same config is grown by each operation, written, loaded by transformers and compared.
    Other models, and built-in families, whose tables have tests, are not tried.

    Raises:
        GrowthError: an operation did something else, or left files that transformers does not load.
    """
    if not isinstance(shape, PretrainedShape) or shape.config["model_type"] in BUILT_IN:
        return
    for operation in operations:
        try:
            larger, _ = plan(shape, operation)
        except (ArchitectureError, GrowthError):
            return  # refused where it is due, by its own name
        if shape.config != larger.config and not isinstance(operation.value, VocabularyMap):
            value: Any = [operation.name, operation.value, dict(operation.options)]
            _try(
                repr(shape.family),
                *map(json.dumps, (dict(shape.config), dict(larger.config), value)),
            )
        shape = larger


@lru_cache(maxsize=64)
def _try(_table: str, before: str, after: str, operation: str) -> None:
    """Try one operation. Arguments are texts, so that equal trials are made once."""
    shapes = [PretrainedShape(json.loads(config)) for config in (before, after)]
    tried_operation = Operation(*json.loads(operation))
    try:
        twin = twin_of(shapes, [tried_operation])
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place, "small")
            write_twin(twin.shape, folder, single_experts=False)
            grow_folder(open_folder(folder), Path(place, "grown"), twin.operations, check=True)
    except InstarError as error:
        raise GrowthError(
            f"{tried_operation.name}: the table of the family {shapes[0].family.name} does not fit its model: a small model of the same config "
            f"was grown by it and compared: {error}"
        ) from error
