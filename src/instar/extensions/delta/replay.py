"""States block by block: two files compared, and a link applied; the states of a chain rebuilt and verified, links
squashed into one, old states removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from instar.checkpoint.manifest import CheckpointError
from instar.extensions.delta.format.encoding import Words, encode_block
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
    segments,
    write_chain_index,
)
from instar.extensions.delta.format.link import (
    Footer,
    Head,
    LinkFile,
    LinkWriter,
    Values,
    coding,
    read_link,
)
from instar.extensions.delta.format.state import (
    Outline,
    State,
    StateHash,
    file_header,
    open_state,
    outline,
    write_state,
)
from instar.record import atomic
from instar.record.progress import Advance, progress, track_items

_SHOWN = 10


def compare_states(base: State, new: State, writer: LinkWriter, values: Values) -> tuple[str, str]:
    """Write the differences of two states of the same tensors; return the hashes of both."""
    entries = outline(new)
    hashes = StateHash(entries), StateHash(entries)
    for name in track_items(sorted(new), "comparing", "tensors"):
        for number, (old_words, new_words) in enumerate(
            zip(base[name].blocks(), new[name].blocks(), strict=True)
        ):
            hashes[0].update(name, old_words)
            hashes[1].update(name, new_words)
            difference = encode_block(old_words, new_words, coding(entries[name].dtype, values))
            if difference is not None:
                writer.add(name, number, difference)
    return hashes[0].hexdigest(), hashes[1].hexdigest()


def head_of(entries: Outline, *, base: str, result: str) -> Head:
    """Return the head of a link of a state, which is not in a chain yet."""
    return Head(
        base=base,
        result=result,
        elements=sum(entry.elements for entry in entries.values()),
        full_bytes=sum(entry.size_bytes for entry in entries.values()),
    )


def create_file(base: Path, new: Path, target: Path, values: Values = "steps") -> Footer:
    """Write the difference from one safetensors file to another as a link.

    Args:
        base, new: files, or folders in the layout of transformers.
        values: `absolute` stores new words instead of steps: larger, but it can be applied again to
            a base that has some of them already.

    Raises:
        CheckpointError: a file is invalid, tensors differ in name, dtype or shape, or the link cannot
            be written.
    """
    old_state, new_state = open_state(base), open_state(new)
    entries = outline(new_state)
    _check_same(outline(old_state), entries, base, new)
    try:
        with atomic.atomic_file(target.absolute()) as temporary, temporary.open("wb") as file:
            writer = LinkWriter(file, entries, values)
            base_hash, result = compare_states(old_state, new_state, writer, values)
            return writer.finish(head_of(entries, base=base_hash, result=result))
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror}") from error


def _check_same(old: Outline, new: Outline, base: Path, target: Path) -> None:
    """Raise a CheckpointError with all tensors that differ in name, dtype or shape."""
    problems = [f"{name} is missing in {target}" for name in sorted(old.keys() - new.keys())]
    problems += [f"{name} is missing in {base}" for name in sorted(new.keys() - old.keys())]
    for name in sorted(old.keys() & new.keys()):
        before, after = old[name], new[name]
        if before != after:
            problems.append(
                f"{name} is {before.dtype} {list(before.shape)} in {base}, and {after.dtype} "
                f"{list(after.shape)} in {target}"
            )
    if problems:
        first_problems = problems[:_SHOWN] + [f"… and {len(problems) - _SHOWN} more"] * (
            len(problems) > _SHOWN
        )
        raise CheckpointError(
            "\n".join(
                [*first_problems, "A delta needs the same tensors; save the new state as a whole"]
            )
        )


class Replay:
    """Rebuilds the state after the last of some links, and hashes base and result meanwhile.

    Args:
        base: the state before the first link.
        name: of the base, for errors.
        expected: hash of the base; None: any base that leads to the right result.
        every: hash the state after every link, not only the last.

    Raises:
        CheckpointError: a link changes a tensor that the base does not have in that dtype and shape.
    """

    def __init__(
        self,
        base: State,
        links: Sequence[LinkFile],
        name: str,
        *,
        expected: str | None,
        every: bool = False,
    ) -> None:
        self.outline = outline(base)
        for link in links:
            link.check_fits(self.outline)
        self._base, self._links, self._name = base, links, name
        self._expected = expected
        checked_links = links if every else links[-1:]
        self._base_hash = StateHash(self.outline)
        self._hashes = [(link, StateHash(self.outline)) for link in checked_links]

    def progress(self, doing: str) -> AbstractContextManager[Advance]:
        """Show how much of the state is rebuilt."""
        return progress(doing, sum(entry.size_bytes for entry in self.outline.values()))

    def blocks(self, name: str, advance: Advance = lambda _: None) -> Iterator[Words]:
        """Yield the blocks of a tensor in the result, as views or copies; `advance` counts bytes."""
        hashes = {id(link): digest for link, digest in self._hashes}
        for number, words in enumerate(self._base[name].blocks()):
            self._base_hash.update(name, words)
            file_words = words  # read-only
            for link in self._links:
                if (difference := link.difference(name, number)) is not None:
                    words = words.copy() if words is file_words else words
                    link.apply(name, difference, words)
                if id(link) in hashes:
                    hashes[id(link)].update(name, words)
            yield words
            advance(words.nbytes)

    def check(self) -> None:
        """Compare the hashes, after all blocks of all tensors have been taken.

        Raises:
            CheckpointError: the base or the result of a link is not that which was saved.
        """
        base_digest = self._base_hash.hexdigest()
        if self._expected not in (base_digest, None):
            raise CheckpointError(
                f"{self._name}: has the hash {base_digest}, but {self._expected} is needed: it is not the "
                "state that was saved"
            )
        for link, digest in self._hashes:
            if digest.hexdigest() != link.footer.result:
                raise CheckpointError(
                    f"{link.path}: does not make the state that was saved of {self._name}"
                )

    def run(self) -> None:
        """Rebuild and check the state without keeping it."""
        with self.progress(f"verifying the states of {self._name}") as advance:
            for name in self.outline:
                for _ in self.blocks(name, advance):
                    pass
        self.check()

    def write(self, target: Path) -> None:
        """Write the state into a safetensors file, which appears once it is checked.

        Raises:
            CheckpointError: a hash differs, or the file cannot be written.
        """
        try:
            with (
                atomic.atomic_file(target.absolute()) as temporary,
                self.progress(f"writing {target}") as advance,
            ):
                blocks = partial(self.blocks, advance=advance)
                write_state(temporary, self.outline, file_header(self.outline), blocks)
                self.check()
        except OSError as error:
            raise CheckpointError(f"cannot write {target}: {error.strerror}") from error


def apply_file(base: Path, link: Path, target: Path) -> None:
    """Write the state that a link makes of a base.

    Raises:
        CheckpointError: a file is invalid, or the base is not that of the link.
    """
    file = read_link(link)
    # new words may be written again over some of themselves
    expected = None if file.footer.values == "absolute" else file.footer.base
    Replay(open_state(base), [file], str(base), expected=expected).write(target)


def check_out_state(folder: Path, number: int | None, target: Path) -> Link:
    """Write a state into a safetensors file; by default the last state.

    Tied tensors are in it once, as in the files of transformers.

    Raises:
        CheckpointError: there is no such state, a file that leads to it is damaged, or the target
            cannot be written.
    """
    end, replay = replay_to(folder, number)
    replay.write(target)
    return end


def replay_to(folder: Path, number: int | None) -> tuple[Link, Replay]:
    """Open the files that lead to a state; by default to the last.

    Raises:
        CheckpointError: there is no such state, or a link is damaged.
    """
    chain = links(folder)
    segment = segment_of(chain, find_link(chain, number))
    return segment.end, replay_of(segment)


def replay_of(segment: Segment, *, every: bool = False) -> Replay:
    """Open the files of a segment.

    Raises:
        CheckpointError: a link is damaged.
    """
    return Replay(
        open_state(segment.anchor.file),
        [read_link(link.file) for link in segment.links],
        str(segment.anchor.file),
        expected=segment.anchor.result_hash,
        every=every,
    )


def verify_chain(folder: Path) -> list[Link]:
    """Read every byte of a chain, rebuild every state, and compare all hashes.

    Raises:
        CheckpointError: a line for every file that is missing, damaged or from elsewhere.
    """
    chain = links(folder)
    problems = []
    for segment in track_items(segments(chain), f"verifying {folder}", "segments"):
        try:
            replay_of(segment, every=True).run()
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join(problems))
    return chain


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
    before = replay_of(Segment(segment.anchor, segment.links[:at]))
    after = replay_of(segment)
    head = read_link(end.file).footer
    with (
        atomic.atomic_file(end.file) as temporary,
        temporary.open("wb") as file,
        after.progress(f"squashing {first} to {last}") as advance,
    ):
        writer = LinkWriter(file, after.outline, "steps")
        for name, entry in after.outline.items():
            blocks = zip(before.blocks(name), after.blocks(name, advance), strict=True)
            for number, (old, new) in enumerate(blocks):
                if (delta := encode_block(old, new, coding(entry.dtype, "steps"))) is not None:
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
