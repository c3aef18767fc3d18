"""Checkpoints: published atomically, verified when read.

```
checkpoints/step-<n>/
  manifest.json        written last: every file's size and xxh3-128, architecture, history, versions
  model.safetensors    one copy of every parameter, under the name the model gives it
  optimizer.safetensors, ema.safetensors  other components, where the run has them
  model/<i>-of-<n>.safetensors  in place of the file of a component: its rows on rank i, if ranks share
                       a model; the manifest has the rows of each tensor
  rng/rank-<r>.safetensors  state of each rank
  state.json           all other state of the run
checkpoints/latest     the name of the latest checkpoint
checkpoints/best       the name of the best checkpoint by the first metric of checkpoint.best_of
```

A published checkpoint never changes: a second save of step 2000 that differs from the first is
named `step-2000.1`, so that references stay valid. `safetensors` and `json` suffice to read one.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from instar.checkpoint.layout import (
    ComponentReader,
    Layout,
    SavedRows,
    Tensor,
    component_layout,
    file_layout,
    open_reader,
)
from instar.checkpoint.manifest import (
    COMPONENTS,
    MANIFEST,
    STATE,
    SUFFIX,
    CheckpointError,
    Facts,
    FileEntry,
    Manifest,
    Part,
    Pattern,
    StateComponent,
    encode_json,
    encode_manifest,
    file_entry,
    read_json,
    read_manifest,
    verify_files,
)
from instar.distributed.failure import is_secondary
from instar.record import atomic
from instar.record.events import escape_words, from_words, unescape_words
from instar.record.system import versions

if TYPE_CHECKING:
    from instar.distributed.world import World

Tensors = Mapping[str, "Tensor | SavedRows"]

LATEST = "latest"

_WRAPPERS = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk; tensors are read on request."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the saved tensor components: model, optimizer, …"""
        heads = (Path(name).parts[0] for name in self.manifest.files if name.endswith(SUFFIX))
        return tuple(dict.fromkeys(head.removesuffix(SUFFIX) for head in heads))

    @property
    def weights(self) -> str:
        """The component to evaluate or start from: the moving average if there is one, else the model."""
        return "ema" if "ema" in self.components else "model"

    def tensors(
        self, component: str = "model", device: str = "cpu", *, rank: int = 0
    ) -> dict[str, Tensor]:
        """Return the tensors of a component by name, whole; those of `rank` for a component per rank.

        A tied head is saved once, under the name of the token table.

        Raises:
            CheckpointError: the file is not a valid safetensors file.
        """
        saved = _component(component)
        is_per_rank = saved.pattern is Pattern.PER_RANK
        layout = (
            file_layout(self.path / saved.file(rank)) if is_per_rank else self.layout(component)
        )
        with open_reader(layout) as read:
            return {name: read(name).to(device) for name in layout.entries}

    def layout(self, component: str) -> Layout:
        """Return where the tensors of a component are that the ranks share; see `component_layout`."""
        return component_layout(self.path, self.manifest, component)

    def reading(self, component: str) -> AbstractContextManager[ComponentReader]:
        """Context manager that opens a component which the ranks share; see `open_reader`."""
        return open_reader(self.layout(component))


def check_finite(
    path: Path, tensors: Mapping[str, Tensor], hint: str = "use an earlier checkpoint"
) -> None:
    """Raise a CheckpointError if a tensor of `path` holds a value that is not finite."""
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise CheckpointError(
            f"{path}: {len(broken)} tensors, the first {broken[0]}, hold values that are not finite "
            "(NaN or infinite)" + (hint and f"; {hint}")
        )


@dataclass(frozen=True)
class CheckpointContent:
    """What a checkpoint saves; all but the tensors are JSON values, in which tuples become lists."""

    components: Mapping[str, Tensors]
    """tensors of `model`, `optimizer`, `ema` and `rng`, each tensor once: those of the model are its named parameters
    and persistent buffers, not its `state_dict()`, which has tied tensors twice"""
    state: Mapping[str, Any]
    architecture: Mapping[str, Any]
    history: Sequence[Any] = ()
    facts: Facts = field(default_factory=Facts)


def publish_checkpoint(
    root: Path,
    step: int,
    content: CheckpointContent,
    *,
    world: World | None = None,
    files_at_once: int = 4,
) -> Path:
    """Save a checkpoint in the run folder `root` and return its path.

    When this returns the checkpoint is on disk and `latest` names it. If it fails, nothing is left
    of it, and `latest` still names a complete checkpoint. Collective: all ranks of `world` call it,
    and all return or all raise; without a `world` this process saves alone.

    Args:
        content: only rank 0's tensors are saved if ranks hold the same. A component with `SavedRows` is saved in
            parts, by the ranks that have them.
        files_at_once: number of threads that write.

    Raises:
        ValueError: a component is unknown, a name has the prefix of a wrapper, or two tensors share
            memory.
        TypeError: JSON cannot represent a value, or a dictionary key is not a string.
        CheckpointError: the checkpoint cannot be written (disk full, no permission).
        PeerError: any of these happened on another rank.
    """
    writer = CheckpointWriter(root, step, files_at_once)

    def finish(world_size: int) -> Path:
        return writer.publish(
            architecture=dict(content.architecture),
            history=list(content.history),
            facts=content.facts,
            world_size=world_size,
        )

    if world is None or world.size == 1:
        with writer.removed_on_error():
            writer.open()
            writer.write(content.components, content.state, rank=0)
            return finish(world_size=1)
    return _publish_together(writer, content, finish, world)


def _publish_together(
    writer: CheckpointWriter,
    content: CheckpointContent,
    finish: Callable[[int], Path],
    world: World,
) -> Path:
    """Write and publish a checkpoint on all ranks; `finish` publishes it once all have written."""
    from instar.distributed.agree import agree, gather, raise_on_all_ranks

    step, name = writer.step, ""
    # each part ends in a collective, so that a full disk on one rank fails all ranks. Only the rank that
    # renames the folder removes it: others hear of a lost rank sooner or later than rank 0, which may be
    # publishing what they would remove. Where a rank is lost, the next save removes it: others may still write
    with writer.removed_on_error() if world.is_main else nullcontext():
        with (
            raise_on_all_ranks(world, f"opening a checkpoint of step {step:,}"),
            _as_checkpoint_error(writer),
        ):
            if world.is_main:
                writer.open()
        writer.temporary = writer.folder / str(agree(world, writer.temporary.name))
        with (
            raise_on_all_ranks(world, f"writing the checkpoint of step {step:,}"),
            _as_checkpoint_error(writer),
        ):
            writer.write(content.components, content.state, rank=world.rank)
        # entries come from the ranks: rank 0 may see their files later on a network disk
        for entries in gather(world, msgspec.to_builtins(writer.files)):
            writer.files.update(msgspec.convert(entries, dict[str, FileEntry]))
        with raise_on_all_ranks(world, f"publishing the checkpoint of step {step:,}"):
            if world.is_main:
                with _as_checkpoint_error(writer):
                    name = finish(world.size).name
        return writer.folder / str(agree(world, name))


class CheckpointWriter:
    """Write a checkpoint to a temporary folder, and publish it by renaming."""

    def __init__(self, root: Path, step: int, files_at_once: int = 1) -> None:
        self.root, self.step, self.files_at_once = root, step, files_at_once
        self.folder = root / "checkpoints"
        self.temporary = self.folder / f"{atomic.TMP}{secrets.token_hex(8)}"
        self.files: dict[str, FileEntry] = {}
        """entries of the written files by name"""

    def open(self) -> None:
        """Create the temporary folder, and remove those that crashes left."""
        atomic.make_folder(self.folder)
        atomic.sweep(self.folder)
        atomic.make_folder(self.temporary)

    def write(self, components: Mapping[str, Tensors], state: Mapping[str, Any], rank: int) -> None:
        """Write and sync the files of this rank."""
        state_components = {component: _component(component) for component in components}
        for name in chain.from_iterable(components.values()):
            if name.startswith(_WRAPPERS):
                raise ValueError(f"save the model that was wrapped, not its wrapper: {name!r}")
        files = list[_File]()
        for name, tensors in components.items():
            if (rows := _first_rows(tensors)) is not None:
                if rows.saved:
                    file = state_components[name].shard_file(rows.shard, rows.shards)
                    files.append(_File(file, Pattern.SHARDED, *_rows_of(tensors, rows.shard)))
            elif rank == 0 or state_components[name].pattern is Pattern.PER_RANK:
                file = state_components[name].file(rank)
                files.append(_File(file, state_components[name].pattern, *_rows_of(tensors, 0)))
        for folder in {(self.temporary / file.name).parent for file in files} - {self.temporary}:
            atomic.make_folder(folder)
        # one file is hashed while another is synced
        with ThreadPoolExecutor(self.files_at_once) as writers:
            entries = writers.map(lambda file: file.write(self.temporary), files)
            self.files |= {file.name: entry for file, entry in zip(files, entries, strict=True)}
        for folder in {(self.temporary / file.name).parent for file in files}:
            atomic.sync_folder(folder)
        if rank == 0:
            atomic.write_synced(self.temporary / STATE, encode_json(escape_words(state)))
            self.add_files([self.temporary / STATE])

    def add_files(self, paths: Iterable[Path]) -> None:
        """Add written files to the manifest and sync their folders."""
        for path in paths:
            self.files[path.relative_to(self.temporary).as_posix()] = _entry(path, self.temporary)
            atomic.sync_folder(path.parent)

    def publish(
        self, *, architecture: dict[str, Any], history: list[Any], facts: Facts, world_size: int
    ) -> Path:
        """Write the manifest and publish the folder, after all ranks have written."""
        manifest = Manifest(
            step=self.step,
            time=_time_after_all(self.folder),
            world_size=world_size,
            files=dict(sorted(self.files.items())),
            architecture=architecture,
            history=history,
            versions=versions(),
            **{field: getattr(facts, field) for field in Facts.__struct_fields__},
        )
        atomic.write_synced(self.temporary / MANIFEST, encode_manifest(manifest))
        atomic.sync_folder(self.temporary)
        path = _publish_folder(self.temporary, self.folder, self.step)
        for parent in (self.folder, self.root):
            atomic.sync_folder(parent)
        atomic.sync_name(self.root)
        atomic.replace_file(self.folder / LATEST, path.name.encode() + b"\n")
        return path

    @contextmanager
    def removed_on_error(self) -> Iterator[None]:
        """Remove the temporary folder if the block raises, unless another rank is lost; raises OSError as
        CheckpointError."""
        try:
            with _as_checkpoint_error(self):
                yield
        except BaseException as error:
            if not is_secondary(error):
                atomic.remove_tree(self.temporary)
            raise


@contextmanager
def _as_checkpoint_error(writer: CheckpointWriter) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot save step {writer.step:,} in {writer.folder}: {error}"
        ) from error


def load_checkpoint(path: Path, *, check: bool = True) -> Checkpoint:
    """Return the checkpoint in the folder `path`; by default verifies all checksums.

    Raises:
        CheckpointError: a file is missing or damaged; has its name and the reason.
    """
    manifest = read_manifest(path)
    if check:
        verify_files(path, manifest)
    return Checkpoint(path, manifest, unescape_words(from_words(read_json(path / STATE))))


def _component(name: str) -> StateComponent:
    if name not in COMPONENTS:
        raise ValueError(f"unknown component {name!r}; known are {', '.join(COMPONENTS)}")
    return COMPONENTS[name]


def _entry(path: Path, temporary: Path) -> FileEntry:
    return file_entry(
        path, COMPONENTS[path.relative_to(temporary).parts[0].partition(".")[0]].pattern
    )


def _first_rows(tensors: Tensors) -> SavedRows | None:
    """Return a tensor of a component that ranks save in parts; None if there is none."""
    return next((value for value in tensors.values() if isinstance(value, SavedRows)), None)


def _rows_of(tensors: Tensors, shard: int) -> tuple[dict[str, Tensor], dict[str, Part]]:
    """Return what a shard's file holds: its rows, and in the first shard also whole tensors."""
    files: dict[str, Tensor] = {}
    parts: dict[str, Part] = {}
    for name, value in tensors.items():
        if not isinstance(value, SavedRows):
            if shard == 0:
                files[name] = value
        elif value.tensor.shape[0]:
            files[name] = value.tensor
            parts[name] = Part(value.first, value.last, value.shape)
    return files, parts


def tensors_to_write(tensors: Tensors) -> dict[str, Tensor]:
    """Return what a rank that has these tensors of a component writes of them, if it writes them."""
    if (rows := _first_rows(tensors)) is None:
        return _rows_of(tensors, 0)[0]
    return _rows_of(tensors, rows.shard)[0] if rows.saved else {}


@dataclass(frozen=True)
class _File:
    """A file of tensors that this rank writes."""

    name: str
    pattern: Pattern
    tensors: Mapping[str, Tensor]
    parts: dict[str, Part]

    def write(self, folder: Path) -> FileEntry:
        from instar.checkpoint.tensor_file import check_dense, outlines_of, write_tensors

        check_dense(self.tensors)
        path = folder / self.name
        digest = write_tensors(path, outlines_of(self.tensors), self.tensors.__getitem__)
        return FileEntry(path.stat().st_size, digest, self.pattern, self.parts)


def _publish_folder(temporary: Path, folder: Path, step: int) -> Path:
    """Rename to the first free name for `step`, unless an identical checkpoint exists."""
    names = (f"step-{step}.{number}" if number else f"step-{step}" for number in count())
    paths = (folder / name for name in names)
    path = next(path for path in paths if not path.exists() or _same_content(temporary, path))
    if path.exists():
        atomic.remove_tree(temporary)
    else:
        atomic.rename(temporary, path)
    return path


def _same_content(temporary: Path, existing: Path) -> bool:
    """Return whether both are equal, except time and reason, and the published one is intact."""
    try:
        verify_files(existing, manifest := read_manifest(existing))
    except CheckpointError:
        return False
    return (
        msgspec.structs.replace(
            read_manifest(temporary), time=manifest.time, reason=manifest.reason
        )
        == manifest
    )


def save_time(path: Path) -> float | None:
    """Return the time in a checkpoint's manifest; None if it cannot be read."""
    try:
        return read_manifest(path).time
    except CheckpointError:
        return None


def _time_after_all(folder: Path) -> float:
    """Return the current time, or one just after the last save if the clock was set back."""
    last = max(
        (at for path in folder.glob("step-*") if (at := save_time(path)) is not None), default=0.0
    )
    return max(time.time(), math.nextafter(last, math.inf))
