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

from instar.checkpoint.line import Line, is_on, line_of, manifests_of, replace_line
from instar.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    read_manifest,
)
from instar.checkpoint.store import LATEST, Checkpoint, load, saved_at
from instar.config.files import check_inside, read_regular
from instar.record import atomic
from instar.record.rundir import find_run

BEST = "best"
_NUMBERED = re.compile(r"step-(\d+)(?:\.(\d+))?")


def checkpoints(root: Path) -> list[Path]:
    """Returns all published checkpoints of the run in `root`, in the order of their saves.

    One with an unreadable manifest is ordered by its step.
    """
    found = sorted(
        (int(match[1]), int(match[2] or 0), path)
        for path in (root / "checkpoints").glob("step-*")
        if (match := _NUMBERED.fullmatch(path.name)) and path.is_dir()
    )
    times: dict[Path, float] = {}
    before = -math.inf
    for *_, path in found:
        time = saved_at(path)
        before = times[path] = before if time is None else time
    return [path for *_, path in sorted(found, key=lambda one: (times[one[2]], *one))]


def latest_intact(root: Path, *, check: bool = True) -> tuple[Checkpoint, list[CheckpointError]]:
    """Returns the latest intact checkpoint on the run's line, and the errors of later ones.

    Args:
        check: verify all checksums; otherwise only manifests and states are read.

    Raises:
        CheckpointError: there is none; lists the error of each, and those on branches.
    """
    skipped: list[CheckpointError] = []
    branches: list[str] = []
    line = line_of(root)
    for path in reversed(checkpoints(root)):
        try:
            if not is_on(read_manifest(path), line):
                branches.append(path.name)
                continue
            return load(path, check=check), skipped
        except CheckpointError as error:
            skipped.append(error)
    found = "".join(f"\n  {error}" for error in skipped)
    if branches:
        found += (
            f"\n  {', '.join(branches)}: on a branch that the run has left; to resume from there, "
            "name it: --from"
        )
    raise CheckpointError(f"no whole checkpoint in {root / 'checkpoints'}{found}")


def resolve(text: str, out_dir: Path = Path("runs")) -> Path:
    """Returns the folder of a checkpoint: `text` itself, or the latest of the run with the folder,
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
        existing = ", ".join(each.name for each in checkpoints(path.parent.parent))
        raise CheckpointError(f"{path} does not exist; existing checkpoints: {existing or 'none'}")
    root = path if (path / "checkpoints").is_dir() else find_run(text, out_dir).path
    return latest(root)


def latest(root: Path) -> Path:
    """Returns the checkpoint that `latest` names, else the last one saved.

    Raises:
        CheckpointError: there is none.
    """
    if (named := pointed_at(root, LATEST)) is not None:
        return named
    line = line_of(root)
    found = [path for path in checkpoints(root) if _leads_to(path, line)]
    if not found:
        raise CheckpointError(f"no checkpoint in {root / 'checkpoints'}")
    return found[-1]


def _leads_to(path: Path, line: Line | None) -> bool:
    """Whether a checkpoint has a manifest and is on a line; True if the manifest is unreadable."""
    try:
        return is_on(read_manifest(path), line)
    except CheckpointError:
        return (path / MANIFEST).is_file()


def pointed_at(root: Path, pointer: str) -> Path | None:
    """Returns the checkpoint that `latest`, `best` or `best-<metric>` names; None if there is none.

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
    """Returns the name of the pointer to the best checkpoint of a metric other than the first one:
    `best-kind%2Faccuracy` for kind/accuracy."""
    return f"{BEST}-{quote(metric, safe='')}"


def pointers(root: Path) -> list[str]:
    """Returns the pointers of a run: latest, best, best-…"""
    best = sorted(path.name for path in (root / "checkpoints").glob(f"{BEST}*"))
    return [LATEST, *best]


def dangling_pointers(root: Path) -> list[str]:
    """Returns a sentence for each pointer of a run that names no checkpoint."""
    folder = root / "checkpoints"
    return [
        f"{folder / name}: names no checkpoint of the run"
        for name in pointers(root)
        if os.path.lexists(folder / name) and pointed_at(root, name) is None
    ]


def point(root: Path, pointer: str, checkpoint: Path) -> None:
    """Makes `latest`, `best` or `best-…` name a checkpoint.

    Raises:
        CheckpointError: the pointer cannot be written.
    """
    replace_line(root / "checkpoints" / pointer, checkpoint.name.encode())


LOSS = "loss"


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


def prunable(
    manifests: Sequence[tuple[Path, Manifest]], keep: RetentionPolicy, line: Line | None = None
) -> list[Path]:
    """Returns the checkpoints to delete, of some in the order of their saves.

    Checkpoints on branches do not count against those on the `line` of the run: they stay while
    they are among the last ones of all. Among the best are only those whose metrics can be compared
    with the last one's.
    """
    on_line = [each for each in manifests if is_on(each[1], line)]
    kept = {path for path, _ in [*manifests[-keep.last :], *on_line[-keep.last :]]}
    sign = 1.0 if keep.better == "min" else -1.0
    ranked = [
        (sign * value, -index, path)
        for index, (path, manifest) in enumerate(on_line)
        if manifest.basis == on_line[-1][1].basis
        and (value := _value(manifest, keep.metric)) is not None
        and math.isfinite(value)
    ]
    kept |= {path for *_, path in sorted(ranked)[: keep.best]}
    if keep.every is not None:
        kept |= {path for path, manifest in manifests if manifest.step % keep.every == 0}
    return [path for path, _ in manifests if path not in kept]


def _value(manifest: Manifest, metric: str) -> float | None:
    """Returns a metric of a checkpoint, if it was evaluated; older versions saved the loss only."""
    return manifest.metrics.get(metric, manifest.loss if metric == LOSS else None)


def prune(root: Path, keep: RetentionPolicy) -> list[Path]:
    """Deletes the checkpoints of a run that the policy does not keep, and returns their paths.

    Those that `latest`, `best` or `best-…` name stay, and so do those with an unreadable manifest.
    Each is renamed first, so that no reader finds an incomplete one.

    Raises:
        CheckpointError: one cannot be deleted.
    """
    try:
        check_inside(root, ["checkpoints"])
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    known = list(manifests_of(checkpoints(root)))
    named = {pointed_at(root, pointer) for pointer in pointers(root)}
    removed = [path for path in prunable(known, keep, line_of(root)) if path not in named]
    try:
        for path in removed:
            atomic.discard(path)
    except OSError as error:
        raise CheckpointError(f"cannot delete {path}: {error}") from error
    return removed
