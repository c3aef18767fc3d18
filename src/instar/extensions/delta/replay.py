"""States rebuilt from a base and the links after it, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from instar.checkpoint.manifest import CheckpointError
from instar.extensions.delta.format.encoding import Words
from instar.extensions.delta.format.folder import (
    Link,
    Segment,
    find_link,
    links,
    segment_of,
    segments,
)
from instar.extensions.delta.format.link import LinkFile, read_link
from instar.extensions.delta.format.state import (
    State,
    StateHash,
    file_header,
    open_state,
    outline,
    write_state,
)
from instar.record import atomic
from instar.record.progress import Advance, progress, track_items


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
