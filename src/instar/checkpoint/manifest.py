"""The components of a checkpoint, and its manifest with the size and checksum of every file.

A component of a run's state is replicated, global, or separate on each rank (`Pattern`).

A run that resumes from an earlier checkpoint leaves the later ones on a branch. The line of a checkpoint is the list
of starts that led to it, and is part of its manifest (`Facts.line`); `checkpoints/line` has that of the run and is
written at each start.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import msgspec
import xxhash

from instar.config.errors import InstarError
from instar.config.files import of_bounded_depth, open_regular, read_regular
from instar.record import atomic
from instar.record.events import Count, Moment, escape_words, from_words, to_words, unescape_words
from instar.record.progress import Advance, progress

SUFFIX = ".safetensors"
STATE = "state.json"


class Pattern(StrEnum):
    """Which ranks hold a component, and so which save it."""

    REPLICATED = "REPLICATED"
    """all ranks hold the same values, which is checked by hash; rank 0 saves it"""
    GLOBAL = "GLOBAL"
    """one value for the run; rank 0 saves it"""
    SHARDED = "SHARDED"
    """the ranks hold parts of the same tensors; each saves its rows"""
    PER_RANK = "PER_RANK"
    """each rank holds and saves its own; unusable with another number of ranks"""


@dataclass(frozen=True)
class StateComponent:
    """A component of a run's state."""

    name: str
    pattern: Pattern
    effect_if_missing: str = ""
    """the effect on a resumed run if it is missing; empty: the run cannot be resumed without it"""

    def file(self, rank: int = 0) -> str:
        """Return its file, relative to the checkpoint's folder."""
        if self.pattern is Pattern.GLOBAL:
            return f"{self.name}.json"
        if self.pattern is Pattern.PER_RANK:
            return f"{self.name}/rank-{rank}{SUFFIX}"
        return f"{self.name}{SUFFIX}"

    def shard_file(self, shard: int, shards: int) -> str:
        """Return the file of one rank's rows, relative to the checkpoint's folder."""
        return f"{self.name}/{shard}-of-{shards}{SUFFIX}"


COMPONENTS = {
    component.name: component
    for component in (
        StateComponent("model", Pattern.REPLICATED),
        StateComponent(
            "optimizer",
            Pattern.REPLICATED,
            effect_if_missing="the optimizer's moments start at zero: expect a higher loss for some hundred steps",
        ),
        StateComponent(
            "ema",
            Pattern.REPLICATED,
            effect_if_missing="the moving average starts again from the weights",
        ),
        StateComponent("state", Pattern.GLOBAL),
        StateComponent(
            "rng",
            Pattern.PER_RANK,
            effect_if_missing="random generators are seeded again from the seed, the step and the rank",
        ),
    )
}
"""Every component that a run may save, by name."""


FORMAT = 1
MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 20
_THREADS = 8
_CHECKSUM = "xxh3_128"
LINE = "line"
_FILE = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
"""A file name in the checkpoint's folder or a subfolder; never one that leads out of it."""


class CheckpointError(InstarError):
    """A checkpoint is missing, incomplete, or does not match its manifest."""

    exit_code = 3


class UnreadableError(CheckpointError):
    """A file cannot be read because of its permissions; its content may be intact."""


class Part(msgspec.Struct, frozen=True):
    """The rows of a tensor that a file has."""

    first: Count
    last: Count
    """the row after the last"""
    shape: tuple[Count, ...]
    """of the whole tensor"""


class FileEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file of a checkpoint."""

    size_bytes: Count
    xxh3_128: str
    pattern: str
    """REPLICATED, GLOBAL, SHARDED or PER_RANK; see `Pattern`."""
    parts: dict[str, Part] = {}
    """by tensor, the rows that the file has; of other tensors it has all"""


class RunStart(msgspec.Struct, frozen=True):
    """One start of a run, and the checkpoint from which it resumed."""

    id: str
    step: int
    """0 for the first start"""
    time: float
    """`Manifest.time` of the checkpoint; 0 for the first start"""


Line = Sequence[RunStart]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest records about the run at the time of the save."""

    data: str = ""
    """fingerprint of the training samples"""
    tokenizer: str = ""
    """fingerprint of the tokenizer, if samples are tokens"""
    progress: dict[str, float] = {}
    """steps, samples, tokens, FLOPs and seconds so far"""
    loss: float | None = None
    """of an evaluation at this step, nats"""
    metrics: dict[str, float] = {}
    """all metrics of that evaluation"""
    basis: str = ""
    """digest of what the run's last evaluation was measured on: only metrics on an equal basis are comparable"""
    better: dict[str, Literal["min", "max"]] = {}
    """whether lower or higher values of each metric are better"""
    reason: str = ""
    """why it was saved"""
    left_out: list[str] = []
    """components that the config excludes from checkpoints"""
    buffers: list[str] = []
    """tensors of the model that are buffers"""
    config: dict[str, Any] = {}
    """the initial config by dotted key, without `record`; changes at resumes are in the history;
    empty in older checkpoints"""
    line: list[RunStart] = []
    """the starts that led to the checkpoint, in order; empty in older checkpoints"""


class Manifest(Facts, frozen=True, kw_only=True):
    """The content and origin of a checkpoint."""

    format: int = FORMAT
    step: Count
    time: Moment
    """Unix seconds of the save; later than those of all other checkpoints of the run"""
    world_size: Count
    architecture: dict[str, Any]
    history: list[Any]
    files: dict[str, FileEntry]
    versions: dict[str, str]


def file_entry(path: Path, pattern: str) -> FileEntry:
    """Return the entry of a file on disk."""
    return FileEntry(path.stat().st_size, _hash(path), pattern)


def file_error(
    path: Path, entry: FileEntry, advance: Advance = lambda _: None
) -> CheckpointError | None:
    """Return an error if a file does not match its entry; `advance` counts the bytes read."""
    try:
        if (size := path.stat().st_size) != entry.size_bytes:
            return CheckpointError(f"{path}: {size} bytes, but {entry.size_bytes} were saved")
        if _hash(path, advance) != entry.xxh3_128:
            return CheckpointError(f"{path}: content has changed: its checksum does not match")
    except FileNotFoundError:
        return CheckpointError(f"{path}: missing")
    except PermissionError as error:
        return UnreadableError(f"{path}: cannot be read: {error.strerror}")
    except OSError as error:
        return CheckpointError(f"{path}: {error.strerror}")
    return None


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compare every file with its entry.

    Raises:
        CheckpointError: the first file that is missing or does not match.
    """
    if errors := file_errors(folder, manifest):
        raise errors[0]


def file_errors(folder: Path, manifest: Manifest) -> list[CheckpointError]:
    """Compare every file with its entry, several at a time; return errors in the manifest's order."""
    files = manifest.files
    with (
        progress(f"verifying {folder}", sum(e.size_bytes for e in files.values())) as advance,
        ThreadPoolExecutor(_THREADS) as threads,  # hashing and reading release the GIL
    ):
        checks = {
            name: threads.submit(file_error, folder / name, files[name], advance)
            for name in sorted(files, key=lambda name: -files[name].size_bytes)
        }
    return [error for name in files if (error := checks[name].result())]


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of `manifest.json`; its last field is the checksum of the others."""
    body = _body(manifest)
    return encode_json({**body, _CHECKSUM: xxhash.xxh3_128_hexdigest(encode_json(body))})


def _body(manifest: Manifest) -> dict[str, Any]:
    return {**msgspec.to_builtins(manifest), "config": escape_words(manifest.config)}


class CheckpointId(msgspec.Struct, frozen=True):
    """Which checkpoint a result is of: another one may have its step, and later even its name."""

    name: str
    """of its folder"""
    manifest: str
    """checksum of its manifest, which has the time of the save and the checksum of every file"""


def identify(folder: Path) -> CheckpointId:
    """Return the identity of the checkpoint in `folder`; only its manifest is read.

    Raises:
        CheckpointError: see `read_manifest`.
    """
    body = _body(read_manifest(folder))
    return CheckpointId(folder.name, xxhash.xxh3_128_hexdigest(encode_json(body)))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in `folder`, without checking the other files.

    Raises:
        CheckpointError: it is missing, was changed, or has a newer format.
    """
    path = folder / MANIFEST
    raw = _content(path)
    content = _object(raw, path)
    body = {key: value for key, value in content.items() if key != _CHECKSUM}
    if isinstance(version := body.get("format"), int) and version > FORMAT:
        raise CheckpointError(f"{path}: format {version}; this Instar reads up to {FORMAT}")
    try:
        checksum = xxhash.xxh3_128_hexdigest(encode_json(body))
        if raw != encode_json({**body, _CHECKSUM: checksum}):
            raise CheckpointError(f"{path}: content has changed: its checksum does not match")
        numbers = from_words(body)
        numbers["config"] = unescape_words(numbers.get("config", {}))
        manifest = msgspec.convert(numbers, Manifest)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a manifest: {error}") from error
    for name, entry in manifest.files.items():
        if not (_FILE.fullmatch(name) and re.split(r"[./]", name)[0] in COMPONENTS):
            raise CheckpointError(f"{path}: {name!r} is not the name of a file of a checkpoint")
        if entry.pattern not in list(Pattern):
            raise CheckpointError(
                f"{path}: {name} has the sharing pattern {entry.pattern!r}; this Instar knows "
                f"{', '.join(Pattern)}"
            )
    return manifest


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


def encode_json(value: Mapping[str, Any]) -> bytes:
    """Encode deterministic JSON, with integers of any size and non-finite numbers as words."""
    text = json.dumps(to_words(value), ensure_ascii=False, allow_nan=False)
    # the same bytes as with json's own `indent`, which is written in Python: a quarter of the time
    return msgspec.json.format(text.encode(), indent=2) + b"\n"


def read_json(path: Path, *, follow: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file, without converting the words of non-finite numbers.

    Args:
        follow: the file may be a symbolic link.

    Raises:
        CheckpointError: the file is missing, unreadable, or not a JSON object.
    """
    return _object(_content(path, follow=follow), path)


def _content(path: Path, *, follow: bool = False) -> bytes:
    try:
        return read_regular(path, follow=follow)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except PermissionError as error:
        raise UnreadableError(f"{path}: cannot be read: {error.strerror}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def _object(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content


def _hash(path: Path, advance: Advance = lambda _: None) -> str:
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()
