"""Verification of prepared data: shards are compared with their fingerprints, and sources with what was read of them.

`sources.json` lies beside the shards. Files that were found equal are not read again while their size, times and
inode stay: the user's cache folder has a file for each data set, `shards/` and `sources/`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from instar.config.errors import ConfigError, ConfigProblem
from instar.config.files import cache_home, open_regular, read_regular
from instar.data.source import TokenArray
from instar.data.text.chat import MARKS
from instar.data.text.files import SourceFiles, names_text
from instar.data.text.shards import Shard, TokenDataset, open_dataset, write_once
from instar.record.atomic import atomic_file
from instar.record.progress import Advance, progress

SOURCES_FILE = "sources.json"
_PIECE_BYTES = 1 << 20
_MOST_BYTES = 1 << 30


Stamp = tuple[int, int, int, int, str]
"""A shard's size in bytes, mtime and ctime in ns, and inode, and the fingerprint of its tokens."""


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
    cache = _cache_file("shards", dataset.path)
    stamp_of: dict[str, Stamp] = _read_cache(cache, dict[str, Stamp])
    stamps = {
        shard.file: _shard_stamp(dataset.path, shard) for shard, _ in _shards(dataset, read=False)
    }
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
    _write_cache(cache, {file: stamp_of[file] for file in stamps if file in stamp_of})
    if problems:
        raise ConfigError(*problems)


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
            f"the tokens are not those that were written: fingerprint {fingerprint}, recorded {shard.fingerprint}",
            f"prepare the data set again: {_prepare_command(dataset)}",
            place=file,
        )
    if int(tokens.max()) >= dataset.vocab_size:
        message = f"token {int(tokens.max())} is not in the vocabulary of {dataset.vocab_size}"
        return ConfigProblem((), message, place=file)
    return None


def _prepare_command(dataset: TokenDataset) -> str:
    """Return the command that creates the data set again."""
    facts = ("documents", "bytes", "file_bytes", "python", "resolved")
    settings = {k: v for k, v in dataset.source.items() if v is not None and k not in facts}
    settings = {"path": str(dataset.path)} | settings
    sets = (f"--set {shlex.quote(f'data.{key}={value}')}" for key, value in settings.items())
    return f"rm -r {shlex.quote(str(dataset.path))} && instar data prepare {' '.join(sets)}"


def _shard_stamp(folder: Path, shard: Shard) -> Stamp:
    status = (folder / shard.file).stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_size, *times, status.st_ino, shard.fingerprint


class FileRecord(msgspec.Struct, frozen=True, array_like=True):
    """A file that was read: its size, the xxh3-128 of its content, and its mtime, ctime (both ns) and inode."""

    bytes: int
    digest: str
    stamp: tuple[int, int, int]


Files = dict[str, FileRecord]
"""Files by their names within the source."""


def survey(sources: Mapping[str, SourceFiles]) -> dict[str, Files]:
    """Return what the files of each source hold, by the source's key; read all of them.

    Raises:
        ConfigError: one cannot be read.
    """
    with progress("reading the files of the source") as advance:
        return {
            key: {source.name(file): _record_file(file, advance) for file in source.files}
            for key, source in sources.items()
        }


def write_survey(folder: Path, files: Mapping[str, Files]) -> None:
    """Write `sources.json`."""
    write_once(folder / SOURCES_FILE, msgspec.json.encode(files))


def check_unchanged(sources: Mapping[str, SourceFiles], files: Mapping[str, Files]) -> None:
    """Raise ConfigError if files have changed since they were surveyed, by their sizes and times."""
    for key, source in sources.items():
        for file in source.files:
            before = files[key][source.name(file)]
            if _size_and_stamp(file) != (before.bytes, before.stamp):
                message = f"{file} changed while it was prepared"
                hint = "prepare it again when nothing writes to it"
                raise ConfigError.at(f"data.{key}", message, hint)


def changes(
    folder: Path,
    records: Mapping[str, Files],
    sources: Mapping[str, SourceFiles],
    texts: Mapping[str, str],
) -> list[str]:
    """Return what has changed in the sources since the data in a folder were prepared, in words.

    Args:
        records: what was read, see `read_survey`.
        sources: the files that there are now; a source that is not there is not compared.
        texts: the sources as the config spells them.
    """
    cache = _cache_file("sources", folder)
    contents: Files = _read_cache(cache, Files)
    count = len(contents)
    sentences: list[str] = []
    for key, source in sources.items():
        before, now = records[key], {source.name(file): file for file in source.files}
        common = sorted(now.keys() & before.keys())
        kinds = {
            "new": sorted(now.keys() - before.keys()),
            "gone": sorted(before.keys() - now.keys()),
            "changed": [
                name
                for name in common
                if not _is_same(now[name], before[name], contents, f"{key}/{name}")
            ],
        }
        details = "; ".join(f"{kind}: {names_text(n)}" for kind, n in kinds.items() if n)
        if details:
            sentences.append(f"the files of data.{key} {texts[key]} have changed ({details})")
    if len(contents) != count:
        _write_cache(cache, contents)
    return sentences


def _is_same(file: Path, before: FileRecord, contents: Files, name: str) -> bool:
    """Return whether a file holds what was recorded; what is read to find out is added to `contents`."""
    now = _size_and_stamp(file)
    if now[0] != before.bytes or now == (before.bytes, before.stamp):
        return now[0] == before.bytes
    name = f"{name}/{now[1]}"
    if name not in contents:
        with progress(f"comparing {file}", before.bytes) as advance:
            contents[name] = _record_file(file, advance)
    return contents[name].digest == before.digest


def read_survey(folder: Path) -> dict[str, Files]:
    """Return the record of a folder; {} of data without files, such as a name on the hub.

    Raises:
        ConfigError: it is damaged.
    """
    file = folder / SOURCES_FILE
    try:
        content = read_regular(file, _MOST_BYTES, follow=True)
        return msgspec.json.decode(content, type=dict[str, Files])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError.of(f"cannot be read: {error.strerror}", where=str(file)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError.of(
            f"not a record of sources: {error}", where=str(file), hint="prepare the data set again"
        ) from None


def _record_file(path: Path, advance: Advance) -> FileRecord:
    digest = xxhash.xxh3_128()
    try:
        with open_regular(path, follow=True) as file:
            status = os.fstat(file.fileno())  # before, so that a change from here on is noticed
            while content := file.read(_PIECE_BYTES):
                digest.update(content)
                advance(len(content))
    except OSError as error:
        raise ConfigError.at("data.source", f"cannot read {path}: {error.strerror}") from None
    return FileRecord(status.st_size, digest.hexdigest(), _stamp(status))


def _size_and_stamp(path: Path) -> tuple[int, tuple[int, int, int]]:
    status = path.stat()
    return status.st_size, _stamp(status)


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _cache_file(kind: str, folder: Path) -> Path | None:
    home = cache_home(kind)
    name = xxhash.xxh3_128_hexdigest(os.fsencode(folder.resolve()))
    return None if home is None else home / f"{name}.json"


def _read_cache(cache: Path | None, kind: Any) -> Any:
    try:
        return {} if cache is None else msgspec.json.decode(read_regular(cache), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _write_cache(cache: Path | None, content: Mapping[str, object]) -> None:
    if cache is not None:
        # on failure the files are read again next time
        with suppress(OSError), atomic_file(cache, durable=False) as temporary:
            temporary.write_bytes(msgspec.json.encode(content))
