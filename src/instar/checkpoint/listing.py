"""Lists, finds and prunes the checkpoints of a run.

A run that resumes from an earlier checkpoint leaves the later ones on a branch. The *line* of a
checkpoint is the list of starts that led to it, and is part of its manifest (`Facts.line`);
`checkpoints/line` has that of the run and is written at each start.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

import msgspec

from instar.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    RunStart,
    read_manifest,
)
from instar.checkpoint.store import LATEST, Checkpoint, load, saved_at
from instar.config.files import check_inside, read_regular
from instar.record import atomic
from instar.record.rundir import find_run

LINE = "line"
Line = Sequence[RunStart]


def continued(start: Manifest | None) -> list[RunStart]:
    """Returns the line of a new start from a checkpoint; None: from the beginning."""
    before = list(start.line) if start is not None else []
    step, time = (start.step, start.time) if start is not None else (0, 0.0)
    return [*before, RunStart(secrets.token_hex(8), step, time)]


def write_line(root: Path, line: Line) -> None:
    """Writes the line of the run in `root`.

    Raises:
        CheckpointError: it cannot be written.
    """
    _replace(root / "checkpoints" / LINE, msgspec.json.encode(list(line)))


def line_of(root: Path) -> Line | None:
    """Returns the line of a run; None if it is unknown, and all checkpoints belong to it."""
    folder = root / "checkpoints"
    try:
        return msgspec.json.decode((folder / LINE).read_bytes(), type=list[RunStart])
    except (OSError, msgspec.MsgspecError):
        pass
    found = (manifest for _, manifest in _manifests(folder.glob("step-*")))
    newest = max(found, key=lambda manifest: manifest.time, default=None)
    return (newest.line or None) if newest is not None else None


def _manifests(paths: Iterable[Path]) -> Iterator[tuple[Path, Manifest]]:
    """Yields the checkpoints whose manifests can be read."""
    for path in paths:
        with suppress(CheckpointError):
            yield path, read_manifest(path)


def is_on(manifest: Manifest, line: Line | None) -> bool:
    """Whether a checkpoint lies on a line."""
    return left_at(manifest, line) is None


def left_at(manifest: Manifest, line: Line | None) -> int | None:
    """Returns the step at which the run left the line of a checkpoint; None if it is on it."""
    if not line:
        return None
    if not manifest.line and line[0].time == 0.0:
        return None  # saved by an older Instar in a run of a newer one
    for start, other in zip(manifest.line, line, strict=False):
        if start != other:
            return min(start.step, other.step)
    if len(manifest.line) > len(line):
        return manifest.line[len(line)].step
    rest = line[len(manifest.line) :]
    return rest[0].step if rest and manifest.time > rest[0].time else None


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


def point(root: Path, pointer: str, checkpoint: Path) -> None:
    """Makes `latest`, `best` or `best-…` name a checkpoint.

    Raises:
        CheckpointError: the pointer cannot be written.
    """
    _replace(root / "checkpoints" / pointer, checkpoint.name.encode())


def _replace(path: Path, line: bytes) -> None:
    try:
        atomic.replace_file(path, line + b"\n")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


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
    they are among the last ones of all.
    """
    on_line = [each for each in manifests if is_on(each[1], line)]
    kept = {path for path, _ in [*manifests[-keep.last :], *on_line[-keep.last :]]}
    sign = 1.0 if keep.better == "min" else -1.0
    ranked = [
        (sign * value, -index, path)
        for index, (path, manifest) in enumerate(on_line)
        if (value := _value(manifest, keep.metric)) is not None and math.isfinite(value)
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
    known = list(_manifests(checkpoints(root)))
    named = {pointed_at(root, pointer) for pointer in pointers(root)}
    removed = [path for path in prunable(known, keep, line_of(root)) if path not in named]
    try:
        for path in removed:
            atomic.discard(path)
    except OSError as error:
        raise CheckpointError(f"cannot delete {path}: {error}") from error
    return removed
