"""A chain of states as training code uses it: append, look up, load, check out, verify.

See `folder` for the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from instar.checkpoint.layout import TensorEntry
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.tensor_file import DTYPES
from instar.extensions.delta.format.folder import (
    Index,
    Kind,
    Link,
    files,
    find_link,
    link_path,
    links,
    lock_chain,
    open_link,
    read_chain_index,
    to_link,
    write_anchor,
    write_chain_index,
)
from instar.extensions.delta.format.link import Footer, Head, LinkWriter
from instar.extensions.delta.format.state import Bits, State, outline, state_hash, word_type
from instar.extensions.delta.replay import (
    check_out_state,
    compare_states,
    head_of,
    replay_to,
    verify_chain,
)
from instar.record import atomic

__all__ = ["Link", "append", "check_out_state", "find_link", "links", "load_state", "verify_chain"]


def append(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    base: Mapping[str, Tensor] | None,
    *,
    anchor: bool = False,
    aliases: Mapping[str, str] | None = None,
    missing: tuple[int, int] | None = None,
) -> Link:
    """Save the next state of a chain; when this returns, it is on disk.

    It is saved as a difference from `base`, or whole, as an anchor, if `anchor` is set, if there is
    no base, if the chain is new, or if names, dtypes, shapes or ties differ from those of the base.

    Args:
        folder: the chain's folder; created if missing.
        step: of the training; may be lower than that of the state before.
        tensors: on any device. Tied tensors are saved once, under the first of their names.
        base: the last state of the chain, which is compared with its hash; None: not at hand.
        aliases: other names of tensors, which are recorded but not saved: name → saved name.
        missing: first and last of the steps before it that should have been saved and were not.

    Raises:
        CheckpointError: `base` is not the last state of the chain, the chain is damaged, another
            process writes it, or the disk is full. The chain is as it was before.
    """
    unique_tensors, names = without_aliases(tensors, aliases or {})
    new = {name: to_bits(tensor) for name, tensor in unique_tensors.items()}
    try:
        atomic.make_folder(folder)
        with lock_chain(folder):
            atomic.sweep(folder)
            return _append(folder, step, new, base, anchor, names, missing)
    except OSError as error:
        raise CheckpointError(
            f"cannot save step {step:,} in {folder}: {error.strerror}; the chain is unchanged"
        ) from error


def _append(
    folder: Path,
    step: int,
    new: State,
    base: Mapping[str, Tensor] | None,
    anchor: bool,
    aliases: dict[str, str],
    missing: tuple[int, int] | None,
) -> Link:
    index = read_chain_index(folder)
    if index is None:
        index = Index(0, None)
        write_chain_index(folder, index)
    last = _last(folder, index)
    number = 0 if last is None else last.number + 1
    entries = outline(new)
    old: State | None = None
    # tensors that were tied are saved once, and those that are tied now were each saved
    if base is not None and last is not None and last.aliases == aliases:
        old = {name: to_bits(tensor) for name, tensor in base.items() if name not in aliases}
    is_anchor = anchor or last is None or old is None or outline(old) != entries
    kind: Kind = "anchor" if is_anchor else "delta"
    path = link_path(folder, kind, number)
    head = msgspec.structs.replace(
        head_of(entries, base=last.result_hash if last else "", result=""),
        number=number,
        first=number,
        step=step,
        aliases=aliases,
        missing=missing,
    )
    try:
        with atomic.atomic_file(path) as temporary:
            if is_anchor or old is None or last is None:
                head = msgspec.structs.replace(head, result=state_hash(new))
                write_anchor(temporary, new, head)
            else:
                head = _write_link(temporary, old, new, head, last)
            size_bytes = temporary.stat().st_size
        write_chain_index(folder, Index(index.first, number, head.result))
    except BaseException:
        _withdraw(path, index)
        raise
    n_changed = head.n_changed if isinstance(head, Footer) else head.elements
    return to_link(path, kind, head, size_bytes, n_changed)


def _withdraw(path: Path, index: Index) -> None:
    """Remove a file that was not acknowledged, so that the caller's base is the last state still."""
    with suppress(OSError):
        if read_chain_index(path.parent) != index:
            write_chain_index(path.parent, index)
    if read_chain_index(path.parent) == index:
        atomic.remove_tree(path)


def _write_link(path: Path, old: State, new: State, head: Head, last: Link) -> Footer:
    with path.open("wb") as file:
        writer = LinkWriter(file, outline(new), "steps")
        base_hash, result = compare_states(old, new, writer, "steps")
        if base_hash != last.result_hash:
            raise CheckpointError(
                f"{path.parent}: the base given is not the state of {last.file.name}, the last of the "
                "chain; give no base to start a new anchor"
            )
        return writer.finish(msgspec.structs.replace(head, result=result))


def _last(folder: Path, index: Index) -> Link | None:
    """Return the last link of a chain; it may not be acknowledged, after a crash."""
    paths = files(folder)
    newest = max(paths, default=None)
    if newest is None or (index.latest is not None and newest < index.latest):
        if index.latest is not None:
            raise CheckpointError(f"{folder}: number {index.latest}, the last one, is missing")
        return None
    last = open_link(paths[newest])
    if newest == index.latest and last.result_hash != index.result:
        raise CheckpointError(f"{last.file}: is not the one that was saved")
    return last


def load_state(folder: Path, number: int | None = None) -> dict[str, Tensor]:
    """Return the tensors of a state under all their names; by default of the last state.

    Raises:
        CheckpointError: there is no such state, or a file that leads to it is damaged.
    """
    end, replay = replay_to(folder, number)
    tensors = {}
    with replay.progress(f"reading {folder}") as advance:
        for name, entry in replay.outline.items():
            tensors[name] = empty(entry)
            words = to_bits(tensors[name]).words
            at = 0
            for block in replay.blocks(name, advance):
                words[at : at + block.size] = block
                at += block.size
    replay.check()
    return tensors | {alias: tensors[name] for alias, name in end.aliases.items()}


_WORDS = {dtype: word for word, dtype in DTYPES.items()}


def to_bits(tensor: Tensor) -> Bits:
    """Return a view of a contiguous CPU tensor's bits; of another one, of a copy.

    Raises:
        ValueError: safetensors has no such dtype.
    """
    if tensor.dtype not in _WORDS:
        raise ValueError(f"tensors of {tensor.dtype} cannot be saved")
    flat = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
    size_bytes = flat.numel() * flat.itemsize
    entry = TensorEntry(_WORDS[tensor.dtype], tuple(tensor.shape), size_bytes)
    return Bits(entry, flat.view(torch.uint8).numpy().view(word_type(entry)))


def empty(entry: TensorEntry) -> Tensor:
    """Return a tensor with unset values.

    Raises:
        CheckpointError: torch has no such dtype.
    """
    if entry.dtype not in DTYPES:
        raise CheckpointError(f"tensors of the dtype {entry.dtype} cannot be loaded into torch")
    return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])


def without_aliases(
    tensors: Mapping[str, Tensor], aliases: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor once, and its other names.

    Tied tensors, which are the same view of the same memory, keep the first of their names; so do
    checkpoints of transformers.

    Raises:
        ValueError: an alias refers to a missing tensor.
    """
    for alias, name in aliases.items():
        if name not in tensors or name in aliases:
            raise ValueError(f"{alias!r} is an alias of {name!r}, which is not saved")
    unique_tensors: dict[str, Tensor] = {}
    all_aliases = dict(aliases)
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        if name in aliases:
            continue
        view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and first.setdefault(view, name) != name:
            all_aliases[name] = first[view]
        else:
            unique_tensors[name] = tensor
    return unique_tensors, all_aliases
