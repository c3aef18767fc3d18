"""A checkpoint held against its own manifest, and against another checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from instar.checkpoint.header import TensorEntry, read_header
from instar.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    FileEntry,
    Manifest,
    faults,
    read_manifest,
)
from instar.checkpoint.patterns import SUFFIX

if TYPE_CHECKING:
    import torch

Verdict = Literal["same", "changed", "only_a", "only_b"]

_THREADS = 8


@dataclass(frozen=True)
class Check:
    """What was found when every byte of a checkpoint was read."""

    path: Path
    broken: tuple[str, ...]
    """what is wrong with each file that is not as it was saved; with the manifest alone, if that
    is broken: without it there is nothing to compare the others with"""
    unlisted: tuple[str, ...]
    """files that the manifest does not know: nobody reads them"""
    size_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / max(self.seconds, 1e-9)


def check(path: Path) -> Check:
    """Compare every file of the checkpoint in the folder `path` with its manifest, several at once."""
    begun = time.perf_counter()
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return Check(path, (str(error),), (), 0, time.perf_counter() - begun)

    def faults_of(item: tuple[str, FileEntry]) -> list[str]:
        alone = msgspec.structs.replace(manifest, files=dict([item]))
        return [str(fault) for fault in faults(path, alone)]

    with ThreadPoolExecutor(_THREADS) as threads:  # hashing and reading release the GIL
        largest_first = sorted(manifest.files.items(), key=lambda item: -item[1].size_bytes)
        found = dict(zip(dict(largest_first), threads.map(faults_of, largest_first), strict=True))
    there = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    return Check(
        path,
        tuple(fault for name in manifest.files for fault in found[name]),
        tuple(sorted(there - manifest.files.keys() - {MANIFEST})),
        sum(entry.size_bytes for entry in manifest.files.values()),
        time.perf_counter() - begun,
    )


@dataclass(frozen=True)
class Difference:
    """One tensor in two checkpoints; `a` and `b` describe it where it is there.

    Of tensors of one shape: the largest |b − a| of an element, and ‖b − a‖ / ‖a‖. Where the shapes
    differ these are None.
    """

    name: str
    verdict: Verdict
    a: TensorEntry | None
    b: TensorEntry | None
    max_abs: float | None = None
    relative_l2: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_tensors(a: Path, b: Path) -> dict[str, list[Difference]]:
    """Every tensor of two checkpoints' folders, by file, in A's order and then in B's.

    One tensor at a time is in memory. "same" is said of equal types, shapes and bytes.

    Raises:
        CheckpointError: a manifest or a file of tensors cannot be read.
    """
    files = dict.fromkeys([*_tensor_files(read_manifest(a)), *_tensor_files(read_manifest(b))])
    return {name: list(_compare_files(a / name, b / name)) for name in files}


def _tensor_files(manifest: Manifest) -> list[str]:
    return [name for name in manifest.files if name.endswith(SUFFIX)]


def _compare_files(a: Path, b: Path) -> Iterator[Difference]:
    from safetensors import SafetensorError, safe_open

    in_a, in_b = (read_header(path) if path.exists() else {} for path in (a, b))
    with ExitStack() as stack:
        try:
            reads = {
                path: stack.enter_context(safe_open(path, "pt")).get_tensor
                for path, entries in ((a, in_a), (b, in_b))
                if entries
            }
            for name in dict.fromkeys([*in_a, *in_b]):
                if name not in in_a or name not in in_b:
                    verdict: Verdict = "only_a" if name in in_a else "only_b"
                    yield Difference(name, verdict, in_a.get(name), in_b.get(name))
                else:
                    yield _compare(name, in_a[name], in_b[name], reads[a](name), reads[b](name))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{a} or {b}: {error}") from error


def _compare(
    name: str, entry_a: TensorEntry, entry_b: TensorEntry, a: torch.Tensor, b: torch.Tensor
) -> Difference:
    import torch

    if entry_a.shape != entry_b.shape:
        return Difference(name, "changed", entry_a, entry_b)
    if entry_a.dtype == entry_b.dtype and torch.equal(_bytes(a), _bytes(b)):
        return Difference(name, "same", entry_a, entry_b, 0.0, 0.0)
    a, b = a.to(torch.float64), b.to(torch.float64)
    apart = b - a
    return Difference(
        name,
        "changed",
        entry_a,
        entry_b,
        apart.abs().max().item() if apart.numel() else 0.0,
        (apart.norm() / a.norm()).item() if apart.any() else 0.0,
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)
