"""The difference of two files of tensors as one link, and its application."""

from __future__ import annotations

from pathlib import Path

from instar.checkpoint.manifest import CheckpointError
from instar.extensions.delta.format.encoding import encode_block
from instar.extensions.delta.format.link import Footer, Head, LinkWriter, Values, coding, read_link
from instar.extensions.delta.format.state import Outline, State, StateHash, open_state, outline
from instar.extensions.delta.replay import Replay
from instar.record import atomic
from instar.record.progress import track_items


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


def head_of(entries: Outline, *, base: str, result: str) -> Head:
    """Return the head of a link of a state, which is not in a chain yet."""
    return Head(
        base=base,
        result=result,
        elements=sum(entry.elements for entry in entries.values()),
        full_bytes=sum(entry.size_bytes for entry in entries.values()),
    )


def apply_file(base: Path, link: Path, target: Path) -> None:
    """Write the state that a link makes of a base.

    Raises:
        CheckpointError: a file is invalid, or the base is not that of the link.
    """
    file = read_link(link)
    # new words may be written again over some of themselves
    expected = None if file.footer.values == "absolute" else file.footer.base
    Replay(open_state(base), [file], str(base), expected=expected).write(target)


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


_SHOWN = 10
