"""Lists, finds and prunes the checkpoints of a run."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

from instar.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Line,
    Manifest,
    is_on_line,
    line_of,
    manifests_of,
    read_manifest,
    replace_line,
)
from instar.checkpoint.store import LATEST, Checkpoint, load_checkpoint, save_time
from instar.config.files import check_inside, read_regular
from instar.record import atomic
from instar.record.imported import refuse_imported
from instar.record.rundir import RunDir, find_run

BEST = "best"
LOSS = "loss"
_NUMBERED = re.compile(r"step-(\d+)(?:\.(\d+))?")


def list_checkpoints(root: Path) -> list[Path]:
    """Return all published checkpoints of the run in `root`, in the order of their saves.

    One with an unreadable manifest is ordered by its step.
    """
    saves = sorted(
        (int(match[1]), int(match[2] or 0), path)
        for path in (root / "checkpoints").glob("step-*")
        if (match := _NUMBERED.fullmatch(path.name)) and path.is_dir()
    )
    times: dict[Path, float] = {}
    before = -math.inf
    for *_, path in saves:
        time = save_time(path)
        before = times[path] = before if time is None else time
    return [path for *_, path in sorted(saves, key=lambda save: (times[save[2]], *save))]


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    match = _NUMBERED.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def latest_intact(root: Path, *, check: bool = True) -> tuple[Checkpoint, list[CheckpointError]]:
    """Return the latest intact checkpoint on the run's line, and the errors of later ones.

    Args:
        check: verify all checksums; otherwise only manifests and states are read.

    Raises:
        CheckpointError: there is none; lists the error of each, and those on branches.
    """
    errors: list[CheckpointError] = []
    branches: list[str] = []
    line = line_of(root)
    for path in reversed(list_checkpoints(root)):
        try:
            if not is_on_line(read_manifest(path), line):
                branches.append(path.name)
                continue
            return load_checkpoint(path, check=check), errors
        except CheckpointError as error:
            errors.append(error)
    reasons = "".join(f"\n  {error}" for error in errors)
    if branches:
        reasons += (
            f"\n  {', '.join(branches)}: on a branch that the run has left; to resume from there, "
            "name it: --from"
        )
    raise CheckpointError(f"no whole checkpoint in {root / 'checkpoints'}{reasons}")


def resolve_checkpoint(text: str, out_dir: Path = Path("runs")) -> Path:
    """Return the folder of a checkpoint: `text` itself, or the latest of the run with the folder,
    id or name `text`.

    Raises:
        CheckpointError: the run has no checkpoint.
        ConfigError: there is no such run or folder.
    """
    path = Path(text)
    if (path / MANIFEST).is_file():
        return path
    if _NUMBERED.fullmatch(path.name) and path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}")
    if _NUMBERED.fullmatch(path.name) and path.parent.is_dir():
        existing = ", ".join(checkpoint.name for checkpoint in list_checkpoints(path.parent.parent))
        raise CheckpointError(f"{path} does not exist; existing checkpoints: {existing or 'none'}")
    root = path if (path / "checkpoints").is_dir() else find_run(text, out_dir).path
    return latest_checkpoint(root)


def latest_checkpoint(root: Path) -> Path:
    """Return the checkpoint that `latest` names, else the last one saved.

    Raises:
        CheckpointError: there is none.
        ConfigError: the run was imported from another tool.
    """
    if (target := pointer_target(root, LATEST)) is not None:
        return target
    line = line_of(root)
    paths = [path for path in list_checkpoints(root) if _leads_to(path, line)]
    if not paths:
        refuse_imported(RunDir(root))
        raise CheckpointError(f"no checkpoint in {root / 'checkpoints'}")
    return paths[-1]


def _leads_to(path: Path, line: Line | None) -> bool:
    """Return whether a checkpoint has a manifest and is on a line; True if the manifest is unreadable."""
    try:
        return is_on_line(read_manifest(path), line)
    except CheckpointError:
        return (path / MANIFEST).is_file()


def pointer_target(root: Path, pointer: str) -> Path | None:
    """Return the checkpoint that `latest`, `best` or `best-<metric>` names; None if there is none.

    The metric may be quoted as in `best_pointer` or not.
    """
    folder = root / "checkpoints"
    if pointer.startswith(f"{BEST}-"):
        metric = unquote(pointer.removeprefix(f"{BEST}-"))
        # runs of earlier versions wrote "-" for "/"
        names = (best_pointer(metric), f"{BEST}-{metric.replace('/', '-')}")
        pointer = next((name for name in names if (folder / name).exists()), names[0])
    try:
        name = read_regular(folder / pointer).decode("utf-8", "replace").strip()
    except OSError:
        return None
    exists = _NUMBERED.fullmatch(name) and (folder / name / MANIFEST).is_file()
    return folder / name if exists else None


def best_pointer(metric: str) -> str:
    """Return the name of the pointer to the best checkpoint of a metric other than the first one:
    `best-kind%2Faccuracy` for kind/accuracy."""
    return f"{BEST}-{quote(metric, safe='')}"


def pointers(root: Path) -> list[str]:
    """Return the pointers of a run: latest, best, best-…"""
    best = sorted(path.name for path in (root / "checkpoints").glob(f"{BEST}*"))
    return [LATEST, *best]


def dangling_pointers(root: Path) -> list[str]:
    """Return a sentence for each pointer of a run that names no checkpoint."""
    folder = root / "checkpoints"
    return [
        f"{folder / name}: names no checkpoint of the run"
        for name in pointers(root)
        if os.path.lexists(folder / name) and pointer_target(root, name) is None
    ]


def update_pointer(root: Path, pointer: str, checkpoint: Path) -> None:
    """Make `latest`, `best` or `best-…` name a checkpoint.

    Raises:
        CheckpointError: the pointer cannot be written.
    """
    replace_line(root / "checkpoints" / pointer, checkpoint.name.encode())


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints to keep."""

    last: int
    """number of the last ones to keep; at least 1"""
    best: int = 1
    """number of those with the best values of `metric`"""
    every: int | None = None
    """keep all whose step is a multiple of it"""
    metric: str = LOSS
    better: Literal["min", "max"] = "min"
    """whether lower or higher values are better"""


def checkpoints_to_prune(
    manifests: Sequence[tuple[Path, Manifest]], keep: RetentionPolicy, line: Line | None = None
) -> list[Path]:
    """Return the checkpoints to delete, of some in the order of their saves.

    Checkpoints on branches do not count against those on the `line` of the run: they stay while
    they are among the last ones of all. Among the best are only those whose metrics can be compared
    with the last one's.
    """
    on_line = [(path, manifest) for path, manifest in manifests if is_on_line(manifest, line)]
    paths_to_keep = {path for path, _ in [*manifests[-keep.last :], *on_line[-keep.last :]]}
    sign = 1.0 if keep.better == "min" else -1.0
    ranking = [
        (sign * value, -index, path)
        for index, (path, manifest) in enumerate(on_line)
        if manifest.basis == on_line[-1][1].basis
        and (value := _value(manifest, keep.metric)) is not None
        and math.isfinite(value)
    ]
    paths_to_keep |= {path for *_, path in sorted(ranking)[: keep.best]}
    if keep.every is not None:
        paths_to_keep |= {path for path, manifest in manifests if manifest.step % keep.every == 0}
    return [path for path, _ in manifests if path not in paths_to_keep]


def _value(manifest: Manifest, metric: str) -> float | None:
    """Return a metric of a checkpoint, if it was evaluated; older versions saved the loss only."""
    return manifest.metrics.get(metric, manifest.loss if metric == LOSS else None)


def prune_checkpoints(root: Path, keep: RetentionPolicy) -> list[Path]:
    """Delete the checkpoints of a run that the policy does not keep, and return their paths.

    Those that `latest`, `best` or `best-…` name stay, and so do those with an unreadable manifest.
    Each is renamed first, so that no reader finds an incomplete one.

    Raises:
        CheckpointError: one cannot be deleted.
    """
    try:
        check_inside(root, ["checkpoints"])
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    manifests = list(manifests_of(list_checkpoints(root)))
    targets = {pointer_target(root, pointer) for pointer in pointers(root)}
    paths = [
        path for path in checkpoints_to_prune(manifests, keep, line_of(root)) if path not in targets
    ]
    try:
        for path in paths:
            atomic.discard(path)
    except OSError as error:
        raise CheckpointError(f"cannot delete {path}: {error}") from error
    return paths
