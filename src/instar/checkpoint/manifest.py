"""The manifest: what a checkpoint holds, so that a flipped bit anywhere in it is found and named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from instar.checkpoint.patterns import Pattern
from instar.config.errors import InstarError
from instar.record.events import from_words, to_words

FORMAT = 1
MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 20
_CHECKSUM = "xxh3_128"


class CheckpointError(InstarError):
    """A checkpoint that is not there, not whole, or not what its manifest says."""

    exit_code = 3


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    size_bytes: int
    xxh3_128: str
    pattern: str
    """Who holds and who saves it: REPLICATED, GLOBAL or PER_RANK."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a run says of the moment it is saved at."""

    data: str = ""
    """fingerprint of the samples trained on"""
    tokenizer: str = ""
    """fingerprint of what made tokens of them, where they are tokens"""
    progress: dict[str, float] = {}
    """steps, samples, tokens, FLOPs and seconds so far"""
    loss: float | None = None
    """of the last evaluation, nats, if it was made at this very step"""
    reason: str = ""
    """why it was saved"""
    left_out: list[str] = []
    """parts of the state that the config says not to save"""


class Manifest(Facts, frozen=True, kw_only=True):
    """What a checkpoint holds and where it comes from."""

    format: int = FORMAT
    step: int
    time: float
    """seconds since the epoch at which it was saved; later than any other of the run"""
    world_size: int
    architecture: dict[str, Any]
    history: list[Any]
    files: dict[str, FileEntry]
    versions: dict[str, str]


def describe(path: Path, pattern: str) -> FileEntry:
    """The entry of a file as it is on the disk now."""
    return FileEntry(path.stat().st_size, _hash(path), pattern)


def faults(folder: Path, manifest: Manifest) -> Iterator[CheckpointError]:
    """What is wrong with each file that is not as its entry says."""
    for name, said in manifest.files.items():
        path = folder / name
        try:
            if (size := path.stat().st_size) != said.size_bytes:
                yield CheckpointError(f"{path}: {size} bytes, but {said.size_bytes} were saved")
            elif _hash(path) != said.xxh3_128:
                yield CheckpointError(f"{path}: not what was saved: its checksum is another")
        except FileNotFoundError:
            yield CheckpointError(f"{path}: missing")
        except OSError as error:
            yield CheckpointError(f"{path}: {error.strerror}")


def verify(folder: Path, manifest: Manifest) -> None:
    """Compare every file with its entry.

    Raises:
        CheckpointError: names the first file that is missing or another, and what is wrong.
    """
    for fault in faults(folder, manifest):
        raise fault


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`, the checksum of the rest of it in its last line."""
    body = msgspec.to_builtins(manifest)
    return encode_json({**body, _CHECKSUM: xxhash.xxh3_128_hexdigest(encode_json(body))})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`; the other files are not looked at.

    Raises:
        CheckpointError: it is missing, was changed, or is of a newer format.
    """
    path = folder / MANIFEST
    content = read_json(path)
    body = {key: value for key, value in content.items() if key != _CHECKSUM}
    if isinstance(found := body.get("format"), int) and found > FORMAT:
        raise CheckpointError(f"{path}: format {found}; this Instar reads up to {FORMAT}")
    try:
        checksum = xxhash.xxh3_128_hexdigest(encode_json(body))
        if path.read_bytes() != encode_json({**body, _CHECKSUM: checksum}):
            raise CheckpointError(f"{path}: not what was saved: its checksum is another")
        manifest = msgspec.convert(from_words(body), Manifest)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a manifest: {error}") from error
    for name, entry in manifest.files.items():
        if entry.pattern not in list(Pattern):
            raise CheckpointError(
                f"{path}: {name} has the sharing pattern {entry.pattern!r}; this Instar knows "
                f"{', '.join(Pattern)}"
            )
    return manifest


def encode_json(value: Mapping[str, Any]) -> bytes:
    """Always the same bytes for the same value; integers of any size; non-finite numbers as words."""
    text = json.dumps(to_words(value), indent=2, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, words still words.

    Raises:
        CheckpointError: missing, unreadable, or not a JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
