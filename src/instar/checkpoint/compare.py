"""Compare a checkpoint with another one (tensors, states, and what their manifests say), or with its own manifest."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from instar.checkpoint.layout import (
    ComponentReader,
    Layout,
    Tensor,
    TensorEntry,
    component_layout,
    file_layout,
    open_reader,
)
from instar.checkpoint.manifest import (
    COMPONENTS,
    MANIFEST,
    STATE,
    SUFFIX,
    CheckpointError,
    Manifest,
    Pattern,
    UnreadableError,
    file_errors,
    read_json,
    read_manifest,
)
from instar.record.progress import Advance, progress

Status = Literal["same", "changed", "only_a", "only_b"]


@dataclass(frozen=True)
class Difference:
    """One tensor in two checkpoints; `a` or `b` is None if it does not exist there.

    `max_abs` is the largest |b − a| of an element, `relative_l2` is ‖b − a‖ / ‖a‖; both are None if
    the shapes differ.
    """

    name: str
    verdict: Status
    a: TensorEntry | None
    b: TensorEntry | None
    max_abs: float | None = None
    relative_l2: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_facts(a: Path, b: Path) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Compare all that two checkpoint folders have beside tensors: by group, the keys that differ, each with
    its value in `a` and in `b`.

    Raises:
        CheckpointError: a manifest or a state cannot be read.
    """
    from instar.config.fields import differing_keys  # slow: `checkpoint verify` needs no schema

    in_a, in_b = read_manifest(a), read_manifest(b)
    return {
        "architecture": differing_keys([in_a.architecture, in_b.architecture]),
        "history": differing_keys(
            [_history_by_number(in_a.history), _history_by_number(in_b.history)]
        ),
        "saved": differing_keys([_save_facts(in_a), _save_facts(in_b)]),
        "state": differing_keys([read_json(folder / STATE) for folder in (a, b)]),
    }


def _history_by_number(history: Sequence[Any]) -> dict[str, Any]:
    return {f"operation {number}": entry for number, entry in enumerate(history, 1)}


def _save_facts(manifest: Manifest) -> dict[str, Any]:
    """Return the parts of a manifest that are compared as one group."""
    return {
        "step": manifest.step,
        "world_size": manifest.world_size,
        "loss": manifest.loss,
        "reason": manifest.reason,
        "data": manifest.data,
        "tokenizer": manifest.tokenizer,
        **{f"progress.{unit}": value for unit, value in manifest.progress.items()},
        **{f"version of {name}": version for name, version in manifest.versions.items()},
    }


def compare_tensors(a: Path, b: Path) -> dict[str, list[Difference]]:
    """Compare every tensor of two checkpoint folders; return the differences by file, or by the
    file that a component would be if it were one.

    Only one tensor of each is in memory at a time. "same" means equal dtypes, shapes and bytes.

    Raises:
        CheckpointError: a manifest or a tensor file cannot be read.
    """
    in_a, in_b = (_layouts(path, read_manifest(path)) for path in (a, b))
    with progress(f"comparing {a.name} and {b.name}") as advance:
        return {
            name: list(_compare_layouts(in_a.get(name), in_b.get(name), advance))
            for name in dict.fromkeys([*in_a, *in_b])
        }


def _layouts(folder: Path, manifest: Manifest) -> dict[str, Layout]:
    layouts: dict[str, Layout] = {}
    for name, entry in manifest.files.items():
        if not name.endswith(SUFFIX):
            continue
        if entry.pattern == Pattern.PER_RANK:
            layouts[name] = file_layout(folder / name)
            continue
        component = name.replace("/", ".").partition(".")[0]
        if (file := COMPONENTS[component].file()) not in layouts:
            layouts[file] = component_layout(folder, manifest, component)
    return layouts


def _compare_layouts(a: Layout | None, b: Layout | None, advance: Advance) -> Iterator[Difference]:
    with ExitStack() as stack:
        read_a, read_b = (
            ComponentReader(Layout(Path(), {}, {}), stack)
            if layout is None
            else stack.enter_context(open_reader(layout))
            for layout in (a, b)
        )
        in_a, in_b = read_a.layout.entries, read_b.layout.entries
        for name in dict.fromkeys([*in_a, *in_b]):
            if name not in in_a or name not in in_b:
                verdict: Status = "only_a" if name in in_a else "only_b"
                yield Difference(name, verdict, in_a.get(name), in_b.get(name))
            else:
                yield _compare(name, in_a[name], in_b[name], read_a(name), read_b(name))
                advance(in_a[name].size_bytes)


def _compare(
    name: str, entry_a: TensorEntry, entry_b: TensorEntry, a: Tensor, b: Tensor
) -> Difference:
    import torch

    if entry_a.shape != entry_b.shape:
        return Difference(name, "changed", entry_a, entry_b)
    in_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    if entry_a.dtype == entry_b.dtype and torch.equal(*in_bytes):
        return Difference(name, "same", entry_a, entry_b, 0.0, 0.0)
    kind = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(kind), b.to(kind)
    difference = b - a
    return Difference(
        name,
        "changed",
        entry_a,
        entry_b,
        difference.abs().max().item() if difference.numel() else 0.0,
        (difference.norm() / a.norm()).item() if difference.any() else 0.0,
    )


@dataclass(frozen=True)
class Verification:
    """The result of verifying a checkpoint."""

    path: Path
    broken: tuple[str, ...]
    """errors of damaged files; only that of the manifest if it is damaged, since the other files
    cannot be checked without it"""
    extra_files: tuple[str, ...]
    """files that are not in the manifest"""
    size_bytes: int
    seconds: float
    unreadable: tuple[str, ...] = ()
    """files that this user may not read"""

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / max(self.seconds, 1e-9)


def verify_checkpoint(path: Path) -> Verification:
    """Compare the files of the checkpoint in the folder `path` with its manifest."""
    start_time = time.perf_counter()
    try:
        manifest = read_manifest(path)
    except UnreadableError as error:
        return Verification(path, (), (), 0, time.perf_counter() - start_time, (str(error),))
    except CheckpointError as error:
        return Verification(path, (str(error),), (), 0, time.perf_counter() - start_time)

    errors = file_errors(path, manifest)
    on_disk = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    return Verification(
        path,
        tuple(str(error) for error in errors if not isinstance(error, UnreadableError)),
        tuple(sorted(on_disk - manifest.files.keys() - {MANIFEST})),
        sum(entry.size_bytes for entry in manifest.files.values()),
        time.perf_counter() - start_time,
        tuple(str(error) for error in errors if isinstance(error, UnreadableError)),
    )
