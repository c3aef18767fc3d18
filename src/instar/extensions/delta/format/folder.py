"""A chain on disk: anchors and links in a folder, numbered from 0, and how states are rebuilt.

```
deltas/
  anchor-0.safetensors   a whole state; its metadata has the head, see `link.Head`
  link-1.delta           the difference from state 0 to state 1
  link-2.delta
  …
  index.json             the first number that is kept, the last acknowledged one and its hash
```

Every file says which state it follows and which it results in, so that a missing, swapped or foreign
one is found. The index makes a missing end known. A link made by squashing holds the changes of
several; files whose numbers it covers are leftovers.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from instar.checkpoint.layout import read_metadata
from instar.checkpoint.manifest import SUFFIX, CheckpointError, encode_json
from instar.config.files import of_bounded_depth, read_regular
from instar.extensions.delta.format.link import Head, decode_head, read_link
from instar.extensions.delta.format.state import State, file_header, outline, write_state
from instar.record import atomic
from instar.record.events import Count
from instar.record.lock import NO_LOCKS, try_flock
from instar.record.progress import progress

logger = logging.getLogger(__name__)

INDEX = "index.json"
HEAD = "instar"
"""Key of the head in the metadata of an anchor."""
CHECKSUM = "xxh3_128"
"""Key of the checksum of the header in the metadata of an anchor."""
_NAME = re.compile(rf"(?:anchor-(\d{{1,15}})\{SUFFIX}|link-(\d{{1,15}})\.delta)", re.ASCII)
LOCK_LIMIT_S = 120.0
_POLL_S = 0.05
_UNKNOWN = "0" * 32
"""Stands for the checksum while it is computed."""

Kind = Literal["anchor", "delta"]


@dataclass(frozen=True)
class Link:
    """An anchor or a link of a chain."""

    number: int
    step: int
    """of the training"""
    kind: Kind
    file: Path
    size_bytes: int
    """of the file"""
    first: int
    """the first number whose changes it holds; `number` unless links were squashed"""
    base_hash: str
    """hash of the state before; empty: there is none"""
    result_hash: str
    elements: int
    """of all tensors"""
    full_bytes: int
    """of all tensors"""
    n_changed: int
    """number of changed elements; all in an anchor"""
    aliases: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[int, int] | None = None
    """first and last of the steps before it whose states were due and are not in the chain"""


class Index(msgspec.Struct, frozen=True):
    """Which part of a chain must exist."""

    first: Count
    latest: Count | None
    """None: nothing is acknowledged yet"""
    result: str = ""
    """hash of the latest state"""
    format: int = 1


@dataclass(frozen=True)
class Segment:
    """An anchor, and the links after it that lead to a state."""

    anchor: Link
    links: tuple[Link, ...]

    @property
    def end(self) -> Link:
        return (self.anchor, *self.links)[-1]


@cache
def _warn_once(folder: Path, reason: str) -> None:
    logger.warning(
        "the file system of %s has no locks (%s): nothing keeps a second process from writing this chain",
        folder,
        reason,
    )


@contextmanager
def lock_chain(folder: Path) -> Iterator[None]:
    """Exclude other writers of a chain while the block runs; wait for one, e.g. a `gc`.

    On a file system without locks it logs a warning and excludes nobody.

    Raises:
        CheckpointError: it still writes after `LOCK_LIMIT_S`.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + LOCK_LIMIT_S
    try:
        with progress(f"waiting for another process that writes {folder}"):
            try:
                while not try_flock(descriptor, fcntl.LOCK_EX):
                    if time.monotonic() > deadline:
                        raise CheckpointError(f"{folder}: another process is writing this chain")
                    time.sleep(_POLL_S)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                _warn_once(folder, str(error.strerror))
        yield
    finally:
        os.close(descriptor)


def read_chain_index(folder: Path) -> Index | None:
    """Return the index; None if there is no chain.

    Raises:
        CheckpointError: it is damaged, or missing though there are links.
    """
    path = folder / INDEX
    try:
        raw = read_regular(path)
    except FileNotFoundError as error:
        if files(folder):
            raise CheckpointError(f"{path}: missing") from error
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    try:
        index = msgspec.json.decode(of_bounded_depth(raw), type=Index)
    except (msgspec.DecodeError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from error
    if raw != _encode_index(index):
        raise CheckpointError(f"{path}: content has changed: its checksum does not match")
    return index


def write_chain_index(folder: Path, index: Index) -> None:
    atomic.replace_file(folder / INDEX, _encode_index(index))


def _encode_index(index: Index) -> bytes:
    body = msgspec.to_builtins(index)
    return encode_json({**body, CHECKSUM: xxhash.xxh3_128_hexdigest(encode_json(body))})


def files(folder: Path) -> dict[int, Path]:
    """Return the anchors and links in a folder by number, without opening them.

    Raises:
        CheckpointError: two have the same number.
    """
    paths: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            number = int(match[1] or match[2])
            if number in paths:
                raise CheckpointError(f"{path}: there is also {paths[number].name}")
            paths[number] = path
    return dict(sorted(paths.items()))


def open_link(path: Path) -> Link:
    """Return an anchor or a link by its head; checks neither its tensors nor its neighbours.

    Raises:
        CheckpointError: it is missing, damaged, or holds another number than its name says.
    """
    link = read_any(path)
    if path != link_path(path.parent, link.kind, link.number):
        raise CheckpointError(f"{path}: this is number {link.number} of a chain, renamed")
    return link


def read_any(path: Path) -> Link:
    """Return an anchor or a link by its head, whatever its name.

    Raises:
        CheckpointError: it is missing or damaged, or neither of them.
    """
    if path.suffix == SUFFIX:
        head = _read_anchor(path)
        return to_link(path, "anchor", head, path.stat().st_size, head.elements)
    file = read_link(path, check=False)
    return to_link(path, "delta", file.footer, file.size_bytes, file.footer.n_changed)


def to_link(path: Path, kind: Kind, head: Head, size_bytes: int, n_changed: int) -> Link:
    return Link(
        head.number,
        head.step,
        kind,
        path,
        size_bytes,
        head.first,
        head.base,
        head.result,
        head.elements,
        head.full_bytes,
        n_changed,
        head.aliases,
        head.missing,
    )


def link_path(folder: Path, kind: Kind, number: int) -> Path:
    name = f"anchor-{number}{SUFFIX}" if kind == "anchor" else f"link-{number}.delta"
    return folder / name


def links(folder: Path) -> list[Link]:
    """Return the anchors and links of a chain in order, which is checked; not their content.

    Raises:
        CheckpointError: there is no chain, or a file is missing, damaged or from elsewhere.
    """
    index = read_chain_index(folder)
    if index is None:
        raise CheckpointError(f"{folder}: there is no chain of delta checkpoints here")
    all_links = [open_link(path) for number, path in files(folder).items() if number >= index.first]
    chain: list[Link] = []
    for link in reversed(all_links):  # a squashed link comes after those that it replaces
        if not chain or link.number < chain[-1].first:
            chain.append(link)
    chain.reverse()
    _check_order(folder, index, chain)
    return chain


def _check_order(folder: Path, index: Index, chain: Sequence[Link]) -> None:
    expected = index.first
    before: Link | None = None
    for link in chain:
        if link.first != expected:
            raise CheckpointError(
                f"{folder}: number {expected} is missing, before {link.file.name}"
            )
        if before is None and link.kind != "anchor":
            raise CheckpointError(f"{link.file}: the chain must begin with an anchor")
        if before is not None and link.base_hash != before.result_hash:
            raise CheckpointError(
                f"{link.file}: does not continue {before.file.name}; one of them is from elsewhere"
            )
        before, expected = link, link.number + 1
    if index.latest is None:
        return
    if expected <= index.latest:
        raise CheckpointError(f"{folder}: number {expected} is missing, of {index.latest}")
    latest = next((link for link in chain if link.number == index.latest), None)
    if latest is None or latest.result_hash != index.result:
        raise CheckpointError(f"{folder}: number {index.latest} is not the one that was saved")


def find_link(chain: Sequence[Link], number: int | None = None, step: int | None = None) -> Link:
    """Return the link with a number, or the last one of a training step; by default the last.

    Raises:
        CheckpointError: there is none.
    """
    for link in reversed(chain):
        if link.number == (number if number is not None else link.number) and link.step == (
            step if step is not None else link.step
        ):
            return link
    wanted_link = f"number {number}" if number is not None else f"step {step}"
    raise CheckpointError(
        f"{chain[-1].file.parent if chain else 'the chain'}: {wanted_link} is not in the chain, which has "
        f"numbers {chain[0].number} to {chain[-1].number}, steps {chain[0].step} to {chain[-1].step}"
        if chain
        else "the chain is empty"
    )


def segment_of(chain: Sequence[Link], end: Link) -> Segment:
    """Return the links from the last anchor to `end`."""
    upto = chain[: chain.index(end) + 1]
    begin = max(at for at, link in enumerate(upto) if link.kind == "anchor")
    return Segment(upto[begin], tuple(upto[begin + 1 :]))


def segments(chain: Sequence[Link]) -> list[Segment]:
    """Return the segments of a chain, each up to the next anchor."""
    begins = [at for at, link in enumerate(chain) if link.kind == "anchor"]
    ends = [*begins[1:], len(chain)]
    return [
        Segment(chain[begin], tuple(chain[begin + 1 : end]))
        for begin, end in zip(begins, ends, strict=True)
    ]


def deltas_of(run: Path) -> Path:
    """Return the chain of deltas in a run's folder."""
    return run / "deltas"


def missing_steps(last: int, step: int, every: int) -> tuple[int, int] | None:
    """Return the first and the last step after `last` and before `step` whose states were due; None:
    there is none."""
    first, end = (last // every + 1) * every, (step - 1) // every * every
    return (first, end) if first <= end else None


def write_anchor(path: Path, state: State, head: Head) -> None:
    """Write and sync an anchor: a safetensors file whose metadata has its head and a checksum."""
    entries = outline(state)
    metadata = {"format": "pt", HEAD: msgspec.json.encode(head).decode(), CHECKSUM: _UNKNOWN}
    metadata[CHECKSUM] = xxhash.xxh3_128_hexdigest(file_header(entries, metadata))
    write_state(path, entries, file_header(entries, metadata), lambda name: state[name].blocks())


def _read_anchor(path: Path) -> Head:
    """Return the head of an anchor.

    Raises:
        CheckpointError: it is missing, damaged, or not an anchor.
    """
    raw, metadata = read_metadata(path)
    if not {HEAD, CHECKSUM} <= metadata.keys():
        raise CheckpointError(f"{path}: not an anchor of a chain")
    checksum = metadata[CHECKSUM]
    blank = raw.replace(checksum.encode(), _UNKNOWN.encode(), 1)
    if xxhash.xxh3_128_hexdigest(blank) != checksum:
        raise CheckpointError(f"{path}: content has changed: its checksum does not match")
    return decode_head(metadata[HEAD], Head, path)
