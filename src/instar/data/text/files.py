"""The files of a text source: which they are, in a fixed order, what they hold by their names, and the rows of JSON.

Rows of JSON are lines or an array of objects, also compressed, with or without a byte order mark.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import json
import lzma
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, cast

import msgspec

from instar.config.errors import ConfigError, ConfigProblem, near_path
from instar.config.files import TooDeep, of_bounded_depth, open_regular

STDLIB = "stdlib"
_TEXT_NAMES = """
    txt text md markdown rst tex org log csv tsv html htm css xml json yaml yml toml ini cfg sql sh
    py pyi pyx c h cc cpp cxx hpp cu rs go java kt scala js mjs jsx ts tsx rb pl php lua r jl swift
    hs ml ex exs erl clj lisp el zig f90 m
"""
_TEXT = frozenset(f".{name}" for name in _TEXT_NAMES.split())
LINES = frozenset({".jsonl", ".ndjson"})
JSON, PARQUET = ".json", ".parquet"
_ROWS = LINES | {PARQUET}
PACKED = frozenset({".gz", ".bz2", ".xz", ".zst"})
"""Endings of compressed files."""
_COMPANION = re.compile(
    r"(readme|license|licence|copying|notice|changelog|citation|contributing)\b.*|"
    r"metadata\.\w+|dataset_infos?\.json|dataset_dict\.json|state\.json",
    re.IGNORECASE,
)
"""Files about a data set, which are no part of it."""
_NOT_OURS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_NAMED = 5
_BOM = b"\xef\xbb\xbf"
_PACKED_BYTES = 1 << 10
"""of zstd read at once: four of them may hold 128 KiB"""


class NoFiles(ConfigError):  # noqa: N818
    """A source that names no files."""


@dataclass(frozen=True)
class SourceFiles:
    """The files that a source names.

    `root` is the folder that their names begin in. `left_out` are names within it, some with a reason.
    """

    root: Path
    files: tuple[Path, ...]
    left_out: tuple[str, ...] = ()

    def name(self, file: Path) -> str:
        return os.path.relpath(file, self.root)

    @property
    def json_is_rows(self) -> bool:
        """Whether JSON files hold rows; beside text they are text."""
        return all(holds_rows(file) or suffix_of(file) == JSON for file in self.files)


def suffix_of(path: Path) -> str:
    """Return the ending of a file's name, without that of its compression."""
    plain = path.with_suffix("") if path.suffix.lower() in PACKED else path
    return plain.suffix.lower()


def is_saved(source: str) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    return any(Path(source, name).is_file() for name in ("state.json", "dataset_dict.json"))


def holds_rows(path: Path) -> bool:
    """Return whether a file named so holds rows, not text, even beside files of text."""
    return suffix_of(path) in _ROWS


def find_files(source: str, key: str = "data.source") -> SourceFiles:
    """Return the files of a source: a file, a folder that is searched for text and rows, or a glob.

    Where there are rows, or what a data set of the hub comes with, files about the data set (a
    README, metadata) are left out.

    Raises:
        NoFiles: there are none.
    """
    path = Path(source)
    if path.is_dir():
        left_out: list[str] = []
        suffixes = _TEXT | _ROWS
        files = []
        for file in walk(path, left_out):
            is_compressed = file.suffix.lower() in PACKED
            if suffix_of(file) in (LINES | {JSON} if is_compressed else suffixes):
                files.append(file)
            else:
                left_out.append(os.path.relpath(file, path))
        has_arrow = any(name.endswith(".arrow") for name in left_out)
        is_of_hub = (has_arrow and is_saved(source)) or _is_of_hub(path)
        source_files = _of_data(path, files, is_of_hub=is_of_hub)
        source_files = SourceFiles(path, source_files.files, (*source_files.left_out, *left_out))
        missing = f"the folder {source} has no text files"
        if has_arrow:
            missing += "; a data set of Hugging Face is read as data.source of data.kind: rows"
        if ids := next((name for name in left_out if name.endswith(".bin")), None):
            missing += f"; token ids are read from a file or a glob, such as {path / ids}"
    elif path.exists():
        return SourceFiles(path.parent, (path,))
    elif glob.has_magic(source):
        # Path.glob rejects absolute patterns
        matches = sorted(Path(name) for name in glob.glob(source, recursive=True))  # noqa: PTH207
        files = [file for file in matches if file.is_file()]
        source_files = _of_data(_fixed(source), files, is_of_hub=False)
        missing = f"no file matches {source}"
    else:
        source_files, missing = SourceFiles(path, ()), f"there is no file or folder {source}"
    if not source_files.files:
        raise NoFiles(
            ConfigProblem(
                (key,),
                missing,
                near_path(source)
                or f"give a file, a folder, a glob, or {STDLIB} for the Python standard library",
                place=key,
            )
        )
    return source_files


def same_place(first: object, other: object) -> bool:
    """Return whether two config values name the same file, folder or glob."""
    if first == other:
        return True
    words = {STDLIB, "byte", "char", "bpe"}
    if not (isinstance(first, str) and isinstance(other, str)) or words & {first, other}:
        return False
    return os.path.realpath(first) == os.path.realpath(other)


def standard_library() -> list[Path]:
    """Return the modules of Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    return [file for file in walk(root, without=_NOT_OURS) if file.suffix == ".py"]


def walk(
    folder: Path, left_out: list[str] | None = None, without: frozenset[str] = frozenset()
) -> Iterator[Path]:
    """Yield files below a folder in a fixed order, without hidden files, byte code and what is in
    folders named `without`.

    Linked folders, and folders of runs and prepared data, are not entered but noted in `left_out`.
    """
    without |= {"__pycache__"}
    notes: list[str] = [] if left_out is None else left_out
    for place, folders, names in os.walk(folder, onerror=_cannot_be_listed):
        inside = sorted(n for n in folders if not n.startswith(".") and n not in without)
        folders[:] = []
        for name in inside:
            path = Path(place, name)
            if reason := _reason_to_skip(path):
                notes.append(f"{os.path.relpath(path, folder)}/ ({reason})")
            else:
                folders.append(name)
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def _cannot_be_listed(error: OSError) -> NoReturn:
    raise ConfigError.at("data.source", f"cannot list {error.filename}: {error.strerror}") from None


def names_text(names: Sequence[str]) -> str:
    """Return some names as text: the first ones, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def open_source(path: Path) -> IO[bytes]:
    """Open a file of a source. Raises ConfigError if it cannot be read."""
    try:
        return open_regular(path, follow=True)
    except OSError as error:
        raise ConfigError.at("data.source", f"cannot read {path}: {error.strerror}") from None


def json_rows(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the JSON of each row with its line, from 1 on, or its place in the array; blank lines are no rows.

    Raises:
        ConfigError: the file cannot be read or unpacked, is neither, or a row is nested too deep.
    """
    try:
        with open_source(path) as file:
            for number, row in _rows(path, _unpack(path, file)):
                try:
                    yield number, of_bounded_depth(row)
                except TooDeep as error:
                    where = f"{path}:{number}"
                    raise ConfigError.of(f"this line is not JSON: {error}", where=where) from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ConfigError.of(f"cannot be unpacked: {error}", where=str(path)) from None


def parse_row(row: bytes) -> Any:
    """Return the value of a row of JSON, also of what Python's `json.dumps` writes and JSON does not have: NaN, numbers
    that no float holds, and halves of characters, which become "?" as in every tokenizer.

    Raises:
        msgspec.DecodeError: it is no JSON.
    """
    try:
        return msgspec.json.decode(row)
    except (msgspec.DecodeError, ValueError):
        try:
            # other encodings, which Python would guess from bytes, are none of rows
            return _whole_characters(json.loads(row.decode()))
        except (ValueError, RecursionError):
            pass
        raise


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_whole_characters(element) for element in value]
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(value[key]) for key in value}
    return value


def _object_of(path: Path, number: int, row: bytes) -> dict[str, Any]:
    """Return a row as an object. Raises ConfigError, naming its place, if it is none."""
    where = f"{path}:{number}"
    try:
        content = parse_row(row)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError.of(f"this line is not JSON: {error}", where=where) from None
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ConfigError.of(f"this line is not a JSON object but a {kind}", where=where)
    return content


def field_value(path: Path, number: int, row: bytes, field: str, *, ids: bool = False) -> Any:
    """Return the text in a row's field, where null is an empty one, or its token ids.

    Raises:
        ConfigError: the row has none; names its place.
    """
    content = _object_of(path, number, row)
    value = content.get(field)
    if field in content and value is None and not ids:
        return ""
    is_list = isinstance(value, list) and all(type(element) is int for element in value)
    if is_list if ids else isinstance(value, str):
        return value
    keys = ", ".join(map(str, content)) or "none"
    expected, key = (
        ("a list of token ids", "data.tokens_field") if ids else ("text", "data.text_field")
    )
    what = f"is not {expected}" if field in content else f"is missing (keys: {keys})"
    raise ConfigError.of(
        f"the field {field!r} {what}",
        where=f"{path}:{number}",
        hint=f"name the field of {'the ids' if ids else 'the text'} in {key}",
        key=key,
    )


def _reason_to_skip(folder: Path) -> str:
    """Return why a folder is not searched, or an empty string."""
    if folder.is_symlink():
        return "a link"
    if (folder / "dataset.json").exists() and (folder / "tokenizer.json").exists():
        return "prepared data"
    if (folder / "run.yaml").exists() and (folder / "events.jsonl").exists():
        return "a run"
    return ""


def _of_data(root: Path, files: Sequence[Path], *, is_of_hub: bool) -> SourceFiles:
    """Return the files that are data, and those about them."""
    if not (is_of_hub or any(map(holds_rows, files))):
        return SourceFiles(root, tuple(files))
    data = [file for file in files if not _COMPANION.fullmatch(file.name)]
    about = tuple(os.path.relpath(file, root) for file in files if _COMPANION.fullmatch(file.name))
    return SourceFiles(root, tuple(data), about)


def _is_of_hub(folder: Path) -> bool:
    """Return whether a folder looks like one that was downloaded from the hub."""
    if (folder / ".cache" / "huggingface").is_dir() or (folder / "dataset_infos.json").exists():
        return True
    try:
        with (folder / "README.md").open("rb") as card:
            return card.read(4) in (b"---\n", b"---\r")
    except OSError:
        return False


def _fixed(pattern: str) -> Path:
    """Return the folder that a glob begins in."""
    parts = Path(pattern).parts
    return Path(*parts[: next(n for n, part in enumerate(parts) if glob.has_magic(part))])


def _unpack(path: Path, file: IO[bytes]) -> IO[bytes]:
    match path.suffix.lower():
        case ".gz":
            return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
        case ".bz2":
            return bz2.BZ2File(file)
        case ".xz":
            return lzma.LZMAFile(file)
        case ".zst":
            try:
                import zstandard
            except ImportError:
                raise ConfigError.at(
                    "data.source",
                    f"unpacking {path} needs zstandard, which is not installed",
                    "install the extra: pip install 'instar[delta]'",
                ) from None
            return io.BufferedReader(_Frames(file, zstandard))
    return file


class _Frames(io.RawIOBase):
    """The content of the frames of a zstd file. Unlike the library's reader it says where a frame is cut or damaged.

    Raises, while it is read:
        EOFError: the file ends within a frame.
        OSError: it is not zstd, or damaged.
    """

    def __init__(self, file: IO[bytes], zstandard: Any) -> None:
        self._file, self._zstandard = file, zstandard
        self._frame: Any = None
        self._packed, self._content = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._packed = self._packed or self._file.read(_PACKED_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends within a frame: a part of the file is missing")
                return 0
            self._unpack()
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

    def _unpack(self) -> None:
        if self._frame is None:
            self._frame = self._zstandard.ZstdDecompressor().decompressobj()
        try:
            self._content = memoryview(self._frame.decompress(self._packed))
        except self._zstandard.ZstdError as error:
            raise OSError(str(error)) from None
        self._packed = b""
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None


def _rows(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    first = True
    for number, line in enumerate(file, 1):
        if first:
            line = line.removeprefix(_BOM)
        if not line.strip():
            continue
        if first and suffix_of(path) == JSON:
            if line.lstrip().startswith(b"["):
                yield from _of_array(path, line + file.read())
                return
            if not _is_row(line):
                raise _no_rows(path, "it is no array of objects, and no JSON lines")
        first = False
        yield number, line


def _of_array(path: Path, content: bytes) -> Iterator[tuple[int, bytes]]:
    try:
        elements = msgspec.json.decode(of_bounded_depth(content), type=list[msgspec.Raw])
    except (msgspec.DecodeError, ValueError) as error:
        try:
            values = parse_row(content)
        except (msgspec.DecodeError, ValueError):
            values = None
        if not isinstance(values, list):
            raise _no_rows(path, str(error)) from None
        elements = [msgspec.Raw(json.dumps(value).encode()) for value in values]
    for number, row in enumerate(elements, 1):
        yield number, bytes(row)


def _is_row(line: bytes) -> bool:
    try:
        return isinstance(parse_row(of_bounded_depth(line)), dict)
    except (msgspec.DecodeError, ValueError):
        return False


def _no_rows(path: Path, reason: str) -> ConfigError:
    hint = "JSON that is to be read as text needs another ending, e.g. .txt"
    return ConfigError.at("data.source", f"{path} has no rows: {reason}", hint)
