"""Making a chain smaller: links squashed into one, and old states removed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from instar.checkpoint.manifest import CheckpointError
from instar.extensions.delta.format.encoding import encode_block
from instar.extensions.delta.format.folder import (
    Index,
    Link,
    Segment,
    files,
    find_link,
    links,
    lock_chain,
    open_link,
    read_chain_index,
    segment_of,
    write_chain_index,
)
from instar.extensions.delta.format.link import Head, LinkWriter, Values, coding, read_link
from instar.extensions.delta.replay import replay_of
from instar.record import atomic


def squash_links(folder: Path, first: int, last: int) -> Link:
    """Replace the links `first` to `last` by one with the same result, and return it.

    The states between them are given up; all others, and the numbers, stay. After a crash the chain
    has the links or their replacement.

    Raises:
        CheckpointError: a link is missing or damaged, an anchor is among them, or the disk is full.
    """
    try:
        with lock_chain(folder):
            return _squash(folder, first, last)
    except OSError as error:
        raise CheckpointError(f"cannot squash {folder}: {error.strerror}") from error


def _squash(folder: Path, first: int, last: int) -> Link:
    chain = links(folder)
    begin, end = find_link(chain, first), find_link(chain, last)
    segment = segment_of(chain, end)
    if begin not in segment.links:
        raise CheckpointError(
            f"{folder}: {first} to {last} cannot be squashed: only links after the anchor "
            f"{segment.anchor.number} lead to {last}"
        )
    at = segment.links.index(begin)
    link_files = [read_link(link.file) for link in segment.links[at:]]
    absolute = all(file.footer.values == "absolute" for file in link_files)
    values: Values = "absolute" if absolute else "steps"
    before = replay_of(Segment(segment.anchor, segment.links[:at]))
    after = replay_of(segment)
    head = link_files[-1].footer
    with (
        atomic.atomic_file(end.file) as temporary,
        temporary.open("wb") as file,
        after.progress(f"squashing {first} to {last}") as advance,
    ):
        writer = LinkWriter(file, after.outline, values)
        for name, entry in after.outline.items():
            blocks = zip(before.blocks(name), after.blocks(name, advance), strict=True)
            for number, (old, new) in enumerate(blocks):
                if (delta := encode_block(old, new, coding(entry.dtype, values))) is not None:
                    writer.add(name, number, delta)
        before.check()
        after.check()
        fields = {name: getattr(head, name) for name in Head.__struct_fields__}
        head_of_all = Head(**fields | {"first": begin.first, "base": begin.base_hash})
        footer = writer.finish(head_of_all)
        size_bytes = temporary.stat().st_size
    for link in segment.links[at:-1]:
        atomic.remove_tree(link.file)
    return replace(
        end,
        first=begin.first,
        base_hash=begin.base_hash,
        size_bytes=size_bytes,
        n_changed=footer.n_changed,
    )


def remove_states(folder: Path, number: int | None = None) -> list[Path]:
    """Remove what is not needed for the states from `number` on; return the removed files.

    Those before the last anchor at or before `number` are removed; without a number only what crashes
    left behind.

    Raises:
        CheckpointError: there is no such state, or a file of the chain is missing or damaged.
    """
    try:
        with lock_chain(folder):
            atomic.sweep(folder)
            chain = links(folder)
            index = read_chain_index(folder)
            if index is not None and number is not None:
                begin = segment_of(chain, find_link(chain, number)).anchor.number
                write_chain_index(folder, msgspec.structs.replace(index, first=begin))
                chain = [link for link in chain if link.number >= begin]
            needed_files = {link.file for link in chain}
            unneeded_files = [path for path in files(folder).values() if path not in needed_files]
            for path in unneeded_files:
                path.unlink()
    except OSError as error:
        raise CheckpointError(f"cannot clean {folder}: {error.strerror}") from error
    return unneeded_files


def rebuild_index(folder: Path) -> list[Link]:
    """Write a damaged or missing index anew from the files there are, and return their chain.

    What was removed from its end is not noticed any more.

    Raises:
        CheckpointError: there is no chain, or a file is missing or damaged.
    """
    try:
        with lock_chain(folder):
            all_links = [open_link(path) for path in files(folder).values()]
            anchors = [link.number for link in all_links if link.kind == "anchor"]
            if not anchors:
                raise CheckpointError(f"{folder}: there is no anchor of a chain here")
            write_chain_index(
                folder, Index(anchors[0], all_links[-1].number, all_links[-1].result_hash)
            )
    except OSError as error:
        raise CheckpointError(f"cannot write in {folder}: {error.strerror}") from error
    return links(folder)
