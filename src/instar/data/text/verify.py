"""Verification of token shards: their tokens are compared with their fingerprints."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import msgspec
import xxhash

from instar.config.errors import ConfigError, ConfigProblem
from instar.config.files import cache_home, read_regular
from instar.data.source import TokenArray
from instar.data.text.chat import MARKS
from instar.data.text.shards import Shard, TokenDataset, open_dataset
from instar.record.atomic import atomic_file
from instar.record.progress import progress


def verify_tokens(dataset: TokenDataset) -> None:
    """Read every token, and the marks of conversations. Raises ConfigError with each shard that differs from
    what was written."""
    if dataset.source.get("kind") == "chat" and dataset.path.name != MARKS:
        verify_tokens(open_dataset(dataset.path / MARKS))
    with progress(f"verifying {dataset.path}") as advance:
        damages = []
        for shard, tokens in _shards(dataset):
            damages.append(_damage(dataset, shard, tokens))
            advance(tokens.nbytes)
    if problems := [problem for problem in damages if problem is not None]:
        raise ConfigError(*problems)


def verify_changed(folder: str | Path) -> None:
    """Verify the shards that have changed since their last verification, and those of marks.

    Results are cached in the user's cache folder, by each file's size, times and inode.

    Raises:
        ConfigError: with each shard that differs from what was written.
    """
    dataset = open_dataset(folder)
    if dataset.source.get("kind") == "chat" and dataset.path.name != MARKS:
        verify_changed(dataset.path / MARKS)
    cache = _cache_file(dataset.path)
    stamp_of = _cached_stamps(cache)
    stamps = {shard.file: _stamp(dataset.path, shard) for shard, _ in _shards(dataset, read=False)}
    files = {file for file, stamp in stamps.items() if stamp_of.get(file) != stamp}
    if not files:
        return
    problems: list[ConfigProblem] = []
    total = sum(stamps[file][0] for file in files)
    with progress(f"verifying {dataset.path}", total) as advance:
        for shard, tokens in _shards(dataset, only=files):
            problem = _damage(dataset, shard, tokens)
            if problem is None:
                stamp_of[shard.file] = stamps[shard.file]
            else:
                problems.append(problem)
            advance(stamps[shard.file][0])
    if cache is not None:
        valid_stamps = {file: stamp_of[file] for file in stamps if file in stamp_of}
        # on failure the shards are verified again next time
        with suppress(OSError), atomic_file(cache, durable=False) as temporary:
            temporary.write_bytes(msgspec.json.encode(valid_stamps))
    if problems:
        raise ConfigError(*problems)


Stamp = tuple[int, int, int, int, str]
"""A shard's size in bytes, mtime and ctime in ns, and inode, and the fingerprint of its tokens."""


def _shards(
    dataset: TokenDataset, only: Collection[str] | None = None, *, read: bool = True
) -> Iterator[tuple[Shard, TokenArray]]:
    """Yield the shards and their tokens, one at a time; without `read`, tokens are empty."""
    for name, split in dataset.splits.items():
        bounds = pairwise(split.offsets.tolist())
        for shard, (begin, end) in zip(dataset.shards[name], bounds, strict=True):
            if only is None or shard.file in only:
                yield shard, split.read(begin, end if read else begin)


def _damage(dataset: TokenDataset, shard: Shard, tokens: TokenArray) -> ConfigProblem | None:
    """Return the damage of a shard's tokens, if any."""
    file = str(dataset.path / shard.file)
    fingerprint = xxhash.xxh3_128_hexdigest(tokens.data)
    if fingerprint != shard.fingerprint:
        return ConfigProblem(
            (),
            f"the tokens are not those that were written: fingerprint {fingerprint}, "
            f"recorded {shard.fingerprint}",
            f"prepare the data set again: {_prepare_command(dataset)}",
            place=file,
        )
    if int(tokens.max()) >= dataset.vocab_size:
        return ConfigProblem(
            (),
            f"token {int(tokens.max())} is not in the vocabulary of {dataset.vocab_size}",
            place=file,
        )
    return None


def _prepare_command(dataset: TokenDataset) -> str:
    """Return the command that creates the data set again."""
    facts = ("documents", "bytes", "file_bytes", "python", "resolved")
    settings = {k: v for k, v in dataset.source.items() if v is not None and k not in facts}
    settings = {"path": str(dataset.path)} | settings
    sets = (f"--set {shlex.quote(f'data.{key}={value}')}" for key, value in settings.items())
    return f"rm -r {shlex.quote(str(dataset.path))} && instar data prepare {' '.join(sets)}"


def _stamp(folder: Path, shard: Shard) -> Stamp:
    status = (folder / shard.file).stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_size, *times, status.st_ino, shard.fingerprint


def _cache_file(folder: Path) -> Path | None:
    home = cache_home("shards")
    name = xxhash.xxh3_128_hexdigest(os.fsencode(folder.resolve()))
    return None if home is None else home / f"{name}.json"


def _cached_stamps(cache: Path | None) -> dict[str, Stamp]:
    if cache is None:
        return {}
    try:
        return msgspec.json.decode(read_regular(cache), type=dict[str, Stamp])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
