"""The line of a run: the starts that led to it.

A run that resumes from an earlier checkpoint leaves the later ones on a branch. The line of a
checkpoint is the list of starts that led to it, and is part of its manifest (`Facts.line`);
`checkpoints/line` has that of the run and is written at each start.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from instar.checkpoint.manifest import CheckpointError, Manifest, RunStart, read_manifest
from instar.config.files import of_bounded_depth, read_regular
from instar.record import atomic

LINE = "line"
Line = Sequence[RunStart]


def line_of_start(start: Manifest | None) -> list[RunStart]:
    """Return the line of a new start from a checkpoint; None: from the beginning."""
    before = list(start.line) if start is not None else []
    step, time = (start.step, start.time) if start is not None else (0, 0.0)
    return [*before, RunStart(secrets.token_hex(8), step, time)]


def write_line(root: Path, line: Line) -> None:
    """Write the line of the run in `root`.

    Raises:
        CheckpointError: it cannot be written.
    """
    replace_line(root / "checkpoints" / LINE, msgspec.json.encode(list(line)))


def line_of(root: Path) -> Line | None:
    """Return the line of a run; None if it is unknown, and all checkpoints belong to it."""
    folder = root / "checkpoints"
    try:
        return msgspec.json.decode(
            of_bounded_depth(read_regular(folder / LINE)), type=list[RunStart]
        )
    except (OSError, msgspec.MsgspecError, ValueError):
        pass
    manifests = (manifest for _, manifest in manifests_of(folder.glob("step-*")))
    newest = max(manifests, key=lambda manifest: manifest.time, default=None)
    return (newest.line or None) if newest is not None else None


def manifests_of(paths: Iterable[Path]) -> Iterator[tuple[Path, Manifest]]:
    """Yield the checkpoints whose manifests can be read."""
    for path in paths:
        with suppress(CheckpointError):
            yield path, read_manifest(path)


def is_on_line(manifest: Manifest, line: Line | None) -> bool:
    """Return whether a checkpoint lies on a line."""
    return superseded_at(manifest, line) is None


def superseded_at(manifest: Manifest, line: Line | None) -> int | None:
    """Return the step at which the run left the line of a checkpoint; None if it is on it."""
    if not line:
        return None
    if not manifest.line and line[0].time == 0.0:
        return None  # saved by an older Instar in a run of a newer one
    for start, other in zip(manifest.line, line, strict=False):
        if start != other:
            return min(start.step, other.step)
    if len(manifest.line) > len(line):
        return manifest.line[len(line)].step
    later_starts = line[len(manifest.line) :]
    return later_starts[0].step if later_starts and manifest.time > later_starts[0].time else None


def replace_line(path: Path, line: bytes) -> None:
    """Replace a file of one line.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        atomic.replace_file(path, line + b"\n")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error
