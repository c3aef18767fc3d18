"""Where the tensors of a checkpoint are: a component is one file, or several with some rows of each.

A layout is made from the headers of the files alone, which need no torch. Reading takes any rows from the files that have
them, so no process needs a whole tensor, and any number of ranks can read what any other number saved.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
from safetensors import SafetensorError, safe_open

from instar.checkpoint.manifest import (
    COMPONENTS,
    SUFFIX,
    CheckpointError,
    FileEntry,
    Manifest,
    Pattern,
    StateComponent,
)
from instar.config.files import check_regular, open_regular
from instar.record.events import Count

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "torch.Tensor"
"""Only whoever reads tensors imports torch."""
_MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in the header of a safetensors file; `dtype` is F32, BF16, I64, …"""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 8),
}
"""Bytes of an element."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path, *, follow: bool = False) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name, in the order of their data.

    Args:
        follow: the file may be a symbolic link.

    Raises:
        CheckpointError: the file cannot be read, is not a safetensors file, or is truncated.
    """
    raw, content, size = _header(path, follow)
    try:
        content.pop("__metadata__", None)
        entries = msgspec.convert(content, dict[str, _Entry])
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
    data_bytes = size - len(raw)
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        if not 0 <= begin <= end <= data_bytes:
            raise CheckpointError(f"{path}: {name} lies outside the file, which ends too early")
        size_bytes = math.prod(entry.shape) * _BYTES.get(entry.dtype, 0)
        if entry.dtype in _BYTES and end - begin != size_bytes:
            raise CheckpointError(
                f"{path}: {name} has {end - begin:,} bytes, and {entry.shape} needs {size_bytes:,}"
            )
    by_place = sorted(entries.items(), key=lambda item: item[1].data_offsets)
    return {
        name: TensorEntry(entry.dtype, entry.shape, entry.data_offsets[1] - entry.data_offsets[0])
        for name, entry in by_place
    }


def read_metadata(path: Path) -> tuple[bytes, dict[str, str]]:
    """Return the whole header of a safetensors file, and its metadata.

    Raises:
        CheckpointError: the file cannot be read, or is not a safetensors file.
    """
    raw, content, _ = _header(path)
    try:
        return raw, msgspec.convert(content.get("__metadata__", {}), dict[str, str])
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error


def _header(path: Path, follow: bool = False) -> tuple[bytes, dict[str, Any], int]:
    """Return the header of a safetensors file with its length, its content, and the file's size."""
    try:
        with open_regular(path, follow=follow) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{path}: not a safetensors file")
            raw = file.read(length)
            content = json.loads(raw)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a safetensors file")
    return prefix + raw, content, size


def encode_header(
    entries: Mapping[str, TensorEntry], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of a safetensors file whose tensors follow in the order of `entries`."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, entry in entries.items():
        end = begin + entry.size_bytes
        content[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def check_shapes(
    folder: Path, headers: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that a component has these tensors.

    Args:
        folder: of the checkpoint, for messages.
        headers: its tensors.

    Raises:
        CheckpointError: one is missing or has another shape.
    """
    for name, shape in shapes.items():
        if name not in headers or headers[name].shape != shape:
            shape_text = headers[name].shape if name in headers else "missing"
            raise CheckpointError(
                f"{folder}: the tensors do not fit the architecture: {name} must have the shape "
                f"{shape}, and is {shape_text}"
            )


class Piece(NamedTuple):
    """Rows `first` … `last` - 1 of a tensor, in a file."""

    file: str
    first: int
    last: int
    entry: TensorEntry
    shape: tuple[int, ...]
    """of the whole tensor"""


@dataclass(frozen=True)
class SavedRows:
    """The rows of a sharded tensor that this rank holds, as it saves them."""

    tensor: Tensor
    """[last - first, …]"""
    first: int
    shape: tuple[int, ...]
    """of the whole tensor"""
    shard: int
    """which part of the tensor this is, of `shards`"""
    shards: int
    saved: bool
    """False if this rank belongs to a replica, whose rows another rank saves"""

    @property
    def last(self) -> int:
        """The row after the last."""
        return self.first + self.tensor.shape[0]


@dataclass(frozen=True)
class Layout:
    """The tensors of a component."""

    folder: Path
    entries: Mapping[str, TensorEntry]
    """of whole tensors"""
    pieces: Mapping[str, tuple[Piece, ...]]
    """of each tensor, in the order of its rows"""
    follow: bool = False
    """whether files may be symbolic links"""


def component_layout(folder: Path, manifest: Manifest, component: str) -> Layout:
    """Return where the tensors of a component are that all ranks share.

    Raises:
        CheckpointError: the component or one of its files is missing, there are files beside, one
            cannot be read, or rows of a tensor are missing or in two files.
    """
    files = files_of(manifest, component)
    _check_files(folder, COMPONENTS[component], files)
    return _join_files(
        folder, {name: (read_header(folder / name), file) for name, file in files.items()}
    )


def file_layout(path: Path) -> Layout:
    """Return the layout of a single file."""
    return _join_files(path.parent, {path.name: (read_header(path), None)})


def linked_layout(folder: Path, files: Iterable[str]) -> Layout:
    """Return the layout of files of whole tensors, which may be symbolic links.

    Raises:
        CheckpointError: a file is missing or cannot be read, or a tensor is in two files.
    """
    headers = {name: read_header(folder / name, follow=True) for name in files}
    file_of: dict[str, str] = {}
    for file, header in headers.items():
        for name in header:
            if (other := file_of.setdefault(name, file)) != file:
                raise CheckpointError(f"{folder / file}: {name} is also in {other}")
    layout = _join_files(folder, {file: (header, None) for file, header in headers.items()})
    return replace(layout, follow=True)


def files_of(manifest: Manifest, component: str) -> dict[str, FileEntry]:
    """Return the entries of the files that hold a component which the ranks share."""
    return {
        name: entry
        for name, entry in manifest.files.items()
        if name.replace("/", ".").partition(".")[0] == component
        and entry.pattern in (Pattern.REPLICATED, Pattern.SHARDED)
    }


_PART = re.compile(rf"\w+/\d{{1,9}}-of-(\d{{1,9}}){re.escape(SUFFIX)}", re.ASCII)


def _check_files(folder: Path, component: StateComponent, files: Collection[str]) -> None:
    """Raise CheckpointError unless these are the files of a component: one, or all of its parts."""
    if not files:
        raise CheckpointError(f"{folder}: its {component.name} is missing")
    parts = max((int(match[1]) for name in files if (match := _PART.fullmatch(name))), default=0)
    # the number is only claimed: not more names than needed are made of it
    expected = {component.shard_file(i, parts) for i in range(min(parts, len(files) + 1))}
    expected = expected or {component.file()}
    listing = ", ".join(sorted(files)[:8])
    for name in sorted(expected.difference(files)):
        raise CheckpointError(f"{folder / name}: not in the manifest, which has {listing}")
    for name in sorted({*files} - expected):
        raise CheckpointError(
            f"{folder / name}: not a part of the {component.name}, with {listing}"
        )


def _join_files(
    folder: Path, files: Mapping[str, tuple[Mapping[str, TensorEntry], FileEntry | None]]
) -> Layout:
    pieces: dict[str, list[Piece]] = {}
    for file, (header, file_entry) in files.items():
        parts = file_entry.parts if file_entry is not None else {}
        for name, entry in header.items():
            rows = entry.shape[0] if entry.shape else 1
            piece = Piece(file, 0, rows, entry, entry.shape)
            if (part := parts.get(name)) is not None:
                piece = Piece(file, part.first, part.last, entry, part.shape)
                if not part.shape or entry.shape != (part.last - part.first, *part.shape[1:]):
                    raise CheckpointError(
                        f"{folder / file}: {name} has the shape {entry.shape}, and the manifest says "
                        f"rows {part.first} to {part.last} of {part.shape}"
                    )
            pieces.setdefault(name, []).append(piece)
    sorted_pieces = {
        name: tuple(sorted(tensor_pieces, key=attrgetter("first", "last")))
        for name, tensor_pieces in pieces.items()
    }
    return Layout(
        folder,
        {n: _join_pieces(folder, n, tensor_pieces) for n, tensor_pieces in sorted_pieces.items()},
        sorted_pieces,
    )


def _join_pieces(folder: Path, name: str, pieces: tuple[Piece, ...]) -> TensorEntry:
    """Return the entry of a whole tensor; raises CheckpointError unless its pieces make it up."""
    first, row = pieces[0], 0
    for piece in pieces:
        if (piece.shape, piece.entry.dtype) != (first.shape, first.entry.dtype):
            raise CheckpointError(
                f"{folder}: {piece.file} has rows of {name} as {piece.entry.dtype} {piece.shape}, and "
                f"{first.file} as {first.entry.dtype} {first.shape}"
            )
        if piece.first != row:
            raise CheckpointError(
                f"{folder}: row {min(row, piece.first)} of {name} is "
                f"{'missing' if piece.first > row else f'also in {piece.file}'}"
            )
        row = piece.last
    if row != (first.shape[0] if first.shape else 1):
        raise CheckpointError(f"{folder}: rows {row} to {first.shape[0]} of {name} are missing")
    return TensorEntry(first.entry.dtype, first.shape, sum(p.entry.size_bytes for p in pieces))


@dataclass
class ComponentReader:
    """Read tensors of a layout, or rows of them. Files are opened when they are needed."""

    layout: Layout
    _stack: ExitStack
    _files: dict[str, Any] = field(default_factory=dict)

    def __call__(self, name: str) -> Tensor:
        """Return a whole tensor."""
        pieces = self._pieces(name)
        if len(pieces) == 1:
            tensor: Tensor = self._open(pieces[0].file).get_tensor(name)
            return tensor
        return self.rows(name, 0, pieces[-1].last)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows `first` … `last` - 1 of a tensor."""
        import torch

        parts: list[Tensor] = [
            self._open(piece.file).get_slice(name)[
                max(first, piece.first) - piece.first : min(last, piece.last) - piece.first
            ]
            for piece in self._pieces(name)
            if piece.first < last and first < piece.last
        ]
        if not parts:  # a rank may have no rows
            piece = self._pieces(name)[0]
            parts = [self._open(piece.file).get_slice(name)[0:0]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def like(self, name: str, like: Tensor | None) -> Tensor:
        """Return a tensor laid out as `like`, whose rows are all that is read if it is sharded.

        A tensor of another shape than `like` is returned whole.
        """
        from instar.distributed.shards import as_sharded, is_sharded, local_row_range

        if like is None or not is_sharded(like) or self.layout.entries[name].shape != like.shape:
            return self(name)
        return as_sharded(self.rows(name, *local_row_range(like)).to(like.device), like)

    def _pieces(self, name: str) -> tuple[Piece, ...]:
        if name not in self.layout.pieces:
            raise CheckpointError(f"{self.layout.folder}: {name} is missing")
        return self.layout.pieces[name]

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.layout.folder / file
            try:
                check_regular(path, follow=self.layout.follow)
                # a mapping would keep the disk space of a deleted checkpoint, and die with a cut file
                file_reader = safe_open(path, "pt", backend="pread")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: {error}") from error
            self._files[file] = self._stack.enter_context(file_reader)
        return self._files[file]


@contextmanager
def open_reader(layout: Layout) -> Iterator[ComponentReader]:
    """Context manager: a reader of the tensors of a layout.

    Raises:
        CheckpointError: a file is not a safetensors file, or has no such tensor.
    """
    try:
        with ExitStack() as stack:
            yield ComponentReader(layout, stack)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{layout.folder}: {error}") from error


class Parts(Mapping[str, Tensor]):
    """The tensors of a component, each read when it is asked for, laid out as another tensor."""

    def __init__(
        self,
        reader: ComponentReader,
        names: Mapping[str, object],
        like: Callable[[str], Tensor | None],
    ) -> None:
        """
        Args:
            names: keys are the tensors' names.
            like: returns the tensor like which one is laid out; None: whole.
        """
        self._reader, self._names, self._like = reader, names, like

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._reader.like(name, self._like(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
