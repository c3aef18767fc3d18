"""What prepared data were read from: each file's content, recorded and compared at every start.

`sources.json` lies beside the shards. Files of the recorded size, times and inode are not read again;
others are compared by content.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from instar.config.errors import ConfigError
from instar.config.files import cache_home, open_regular, read_regular
from instar.data.text.files import SourceFiles, names_text
from instar.data.text.shards import write_once
from instar.record.atomic import atomic_file
from instar.record.progress import Advance, progress

SOURCES_FILE = "sources.json"
_PIECE_BYTES = 1 << 20
_MOST_BYTES = 1 << 30


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
                raise ConfigError.of(
                    f"{file} changed while it was prepared",
                    where=f"data.{key}",
                    hint="prepare it again when nothing writes to it",
                    key=f"data.{key}",
                )


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
    cache = _cache(folder)
    contents = _cached_contents(cache)
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
        details = "; ".join(
            f"{kind}: {names_text(names)}" for kind, names in kinds.items() if names
        )
        if details:
            sentences.append(f"the files of data.{key} {texts[key]} have changed ({details})")
    if len(contents) != count and cache is not None:
        # on failure the files are compared again next time
        with suppress(OSError), atomic_file(cache, durable=False) as temporary:
            temporary.write_bytes(msgspec.json.encode(contents))
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
        raise ConfigError.of(
            f"cannot read {path}: {error.strerror}", where="data.source", key="data.source"
        ) from None
    return FileRecord(status.st_size, digest.hexdigest(), _stamp(status))


def _size_and_stamp(path: Path) -> tuple[int, tuple[int, int, int]]:
    status = path.stat()
    return status.st_size, _stamp(status)


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _cache(folder: Path) -> Path | None:
    home = cache_home("sources")
    name = xxhash.xxh3_128_hexdigest(os.fsencode(folder.resolve()))
    return None if home is None else home / f"{name}.json"


def _cached_contents(cache: Path | None) -> Files:
    """Return what files were found to hold since, by key, name and stamp."""
    try:
        return {} if cache is None else msgspec.json.decode(read_regular(cache), type=Files)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
