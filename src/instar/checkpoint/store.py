"""Checkpoints: published whole or not at all, verified when read.

```
checkpoints/step-<n>/
  manifest.json        written last: every file's size and xxh3-128, architecture, history, versions
  model.safetensors    one copy of every parameter, under the name the model gives it
  optimizer.safetensors, ema.safetensors  other components, where the run has them
  rng/rank-<r>.safetensors  what each rank has of its own
  state.json           everything else that the run must remember
checkpoints/latest     the name of the newest one
checkpoints/best       the name of the one with the lowest validation loss
```

A checkpoint is never changed or replaced: a second save of step 2000 that differs from the first
is called `step-2000.1`, so that whatever points to a checkpoint keeps its meaning. `safetensors`
and `json` are enough to read one.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from instar.checkpoint import disk
from instar.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Facts,
    FileEntry,
    Manifest,
    describe,
    encode_json,
    encode_manifest,
    read_json,
    read_manifest,
    verify,
)
from instar.checkpoint.patterns import COMPONENTS, STATE, SUFFIX, Component, Pattern
from instar.record.events import from_words
from instar.record.rundir import find_run
from instar.record.system import versions

if TYPE_CHECKING:
    import torch

    from instar.distributed.world import World

Tensors = Mapping[str, "torch.Tensor"]

LATEST = "latest"
BEST = "best"
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
_WRAPPERS = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk; its tensors are read when asked for."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the tensor components that were saved: model, optimizer, …"""
        heads = (Path(name).parts[0] for name in self.manifest.files if name.endswith(SUFFIX))
        return tuple(dict.fromkeys(head.removesuffix(SUFFIX) for head in heads))

    def tensors(
        self, component: str = "model", device: str = "cpu", *, rank: int = 0
    ) -> dict[str, torch.Tensor]:
        """A component's tensors by name; of one that each rank has, those of `rank`. A tied head
        is there once, under the name of the table it shares.

        Raises:
            CheckpointError: the file is not a safetensors file, or its size is another now.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.path / _component(component).file(rank)
        try:
            return load_file(path, device=device)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from error


def publish(
    root: Path,
    step: int,
    components: Mapping[str, Tensors],
    state: Mapping[str, Any],
    *,
    architecture: Mapping[str, Any],
    history: Sequence[Any] = (),
    facts: Facts | None = None,
    world: World | None = None,
    files_at_once: int = 4,
) -> Path:
    """Save `components` and `state` under the run directory `root` and return the checkpoint's folder.

    When this returns it is on the disk and `latest` names it. Whatever happens before that, it is
    there whole or not at all, and `latest` names a whole one. All ranks of `world` come here
    together, and all return or all raise; without one this process saves alone.

    `components` are `model`, and whatever else has tensors (`optimizer`, `ema`, `rng`); the model's
    are what `dict(model.named_parameters())` gives, and persistent buffers: every tensor once.
    `state_dict()` would not do: it has tied tensors twice, which safetensors refuses. Of what ranks
    hold alike only rank 0's is looked at. `state`, `architecture`, `history` and `facts` are JSON
    values; tuples come back as lists. `files_at_once`: fewer leave more of the machine to others.

    Raises:
        ValueError: an unknown component, a name with a wrapper's prefix, or two tensors that share
            memory.
        TypeError: a value that JSON cannot say, or a dictionary key that is not a string.
        CheckpointError: it cannot be written (disk full, no permission).
        PeerError: any of these on another rank.
    """
    draft = Draft(root, step, files_at_once)

    def finish(world_size: int) -> Path:
        return draft.publish(
            architecture=dict(architecture),
            history=list(history),
            facts=facts or Facts(),
            world_size=world_size,
        )

    if world is None or world.size == 1:
        with draft.or_nothing():
            draft.open()
            draft.write(components, state, rank=0)
            return finish(world_size=1)
    from instar.distributed.agree import agree, together

    name = ""
    # each rank-local part ends in a meeting, so that one rank's full disk is everyone's
    with draft.or_nothing():
        with together(world, f"opening a checkpoint of step {step:,}"), _as_checkpoint_error(draft):
            if world.is_main:
                draft.open()
        draft.aside = draft.folder / str(agree(world, draft.aside.name))
        with (
            together(world, f"writing the checkpoint of step {step:,}"),
            _as_checkpoint_error(draft),
        ):
            draft.write(components, state, rank=world.rank)
        with together(world, f"publishing the checkpoint of step {step:,}"):
            if world.is_main:
                with _as_checkpoint_error(draft):
                    name = finish(world.size).name
        return draft.folder / str(agree(world, name))


class Draft:
    """A checkpoint that is being written, aside, where no reader looks."""

    def __init__(self, root: Path, step: int, files_at_once: int = 1) -> None:
        self.root, self.step, self.files_at_once = root, step, files_at_once
        self.folder = root / "checkpoints"
        self.aside = self.folder / f"{disk.ASIDE}{secrets.token_hex(8)}"

    def open(self) -> None:
        """Make its folder; what an earlier crash left is removed, for a run has one writer."""
        disk.make_folder(self.folder)
        disk.sweep(self.folder)
        disk.make_folder(self.aside)

    def write(self, components: Mapping[str, Tensors], state: Mapping[str, Any], rank: int) -> None:
        """Write and sync what this rank saves."""
        known = {component: _component(component) for component in components}
        for tensors in components.values():
            _check_names(tensors)
        files: dict[Path, Tensors] = {}
        for name, tensors in components.items():
            pattern = known[name].pattern
            if rank == 0 or pattern is Pattern.PER_RANK:
                path = self.aside / known[name].file(rank)
                if pattern is Pattern.PER_RANK:
                    disk.make_folder(path.parent)
                files[path] = tensors
        # one file is copied to the page cache while another one waits for the disk
        with ThreadPoolExecutor(self.files_at_once) as writers:
            list(writers.map(_write_tensors, files.keys(), files.values()))
        if rank == 0:
            disk.write_synced(self.aside / STATE, encode_json(state))

    def publish(
        self,
        *,
        architecture: dict[str, Any],
        history: list[Any],
        facts: Facts,
        world_size: int,
    ) -> Path:
        """Write the manifest and give the folder its name, when all ranks have written."""
        paths = sorted(path for path in self.aside.rglob("*") if path.is_file())
        manifest = Manifest(
            step=self.step,
            time=_later_than_all(self.folder),
            world_size=world_size,
            files={str(path.relative_to(self.aside)): _entry(path, self.aside) for path in paths},
            architecture=architecture,
            history=history,
            versions=versions(),
            **{field: getattr(facts, field) for field in Facts.__struct_fields__},
        )
        disk.write_synced(self.aside / MANIFEST, encode_manifest(manifest))
        for folder in {path.parent for path in paths} | {self.aside}:
            disk.sync_folder(folder)
        path = _give_name(self.aside, self.folder, self.step)
        for parent in (self.folder, self.root, self.root.parent):
            disk.sync_folder(parent)
        disk.replace_file(self.folder / LATEST, path.name.encode() + b"\n")
        return path

    @contextmanager
    def or_nothing(self) -> Iterator[None]:
        """Leaves nothing behind if it comes to nothing."""
        try:
            with _as_checkpoint_error(self):
                yield
        except BaseException:
            disk.remove_tree(self.aside)
            raise


@contextmanager
def _as_checkpoint_error(draft: Draft) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot save step {draft.step:,} in {draft.folder}: {error}"
        ) from error


def load(path: Path, *, check: bool = True) -> Checkpoint:
    """The checkpoint in the folder `path`; unless told otherwise, every byte of it is checked.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    manifest = read_manifest(path)
    if check:
        verify(path, manifest)
    return Checkpoint(path, manifest, from_words(read_json(path / STATE)))


def checkpoints(root: Path) -> list[Path]:
    """All published checkpoints of the run in `root`, in the order in which they were saved.

    One whose manifest cannot be read stands where its step puts it.
    """
    dated: list[tuple[tuple[int, int], Path, float | None]] = []
    for path in (root / "checkpoints").glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            dated.append(((int(match[1]), int(match[2] or 0)), path, _saved_at(path)))
    dated.sort(key=lambda one: one[0])
    before = -math.inf
    times: dict[Path, float] = {}
    for _, path, saved_at in dated:
        before = times[path] = before if saved_at is None else saved_at
    return [path for _, path, _ in sorted(dated, key=lambda one: (times[one[1]], one[0]))]


def newest_whole(root: Path) -> tuple[Checkpoint, list[CheckpointError]]:
    """The newest checkpoint of which every byte is as it was saved; what is wrong with later ones.

    Raises:
        CheckpointError: there is none; says what is wrong with each.
    """
    skipped: list[CheckpointError] = []
    for path in reversed(checkpoints(root)):
        try:
            return load(path), skipped
        except CheckpointError as error:
            skipped.append(error)
    found = "".join(f"\n  {error}" for error in skipped)
    raise CheckpointError(f"no whole checkpoint in {root / 'checkpoints'}{found}")


def resolve(text: str, out_dir: Path = Path("runs")) -> Path:
    """The checkpoint folder that `text` means: itself, or the latest of a run given by folder, id,
    name or `latest`.

    Raises:
        CheckpointError: the run has none.
        ConfigError: there is no such run or folder.
    """
    path = Path(text)
    if (path / MANIFEST).is_file():
        return path
    if _NAME.fullmatch(path.name) and path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}")
    if _NAME.fullmatch(path.name) and path.parent.is_dir():
        there = ", ".join(each.name for each in checkpoints(path.parent.parent))
        raise CheckpointError(f"{path} is not there; there are {there or 'none'}")
    root = path if (path / "checkpoints").is_dir() else find_run(text, out_dir).path
    return latest(root)


def latest(root: Path) -> Path:
    """The newest checkpoint of the run in `root`: what `latest` names, else the last one saved.

    Raises:
        CheckpointError: there is none.
    """
    if (named := pointed_at(root, LATEST)) is not None:
        return named
    whole = [path for path in checkpoints(root) if (path / MANIFEST).is_file()]
    if not whole:
        raise CheckpointError(f"no checkpoint in {root / 'checkpoints'}")
    return whole[-1]


def pointed_at(root: Path, pointer: str) -> Path | None:
    """The checkpoint that `latest`, `best` or `best-…` names, if it names one that is there."""
    folder = root / "checkpoints"
    try:
        name = (folder / pointer).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    there = _NAME.fullmatch(name) and (folder / name / MANIFEST).is_file()
    return folder / name if there else None


def pointers(root: Path) -> list[str]:
    """The names under which checkpoints of a run may be asked for: latest, best, best-…"""
    there = sorted(path.name for path in (root / "checkpoints").glob(f"{BEST}*"))
    return [LATEST, *there]


def point(root: Path, pointer: str, checkpoint: Path) -> None:
    """Make `latest`, `best` or `best-…` name a checkpoint.

    Raises:
        CheckpointError: the disk does not let us.
    """
    path = root / "checkpoints" / pointer
    try:
        disk.replace_file(path, checkpoint.name.encode() + b"\n")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def _component(name: str) -> Component:
    if name not in COMPONENTS:
        raise ValueError(f"unknown component {name!r}; known are {', '.join(COMPONENTS)}")
    return COMPONENTS[name]


def _check_names(tensors: Tensors) -> None:
    for name in tensors:
        if name.startswith(_WRAPPERS):
            raise ValueError(f"save the model that was wrapped, not its wrapper: {name!r}")


def _entry(path: Path, aside: Path) -> FileEntry:
    return describe(path, COMPONENTS[path.relative_to(aside).parts[0].partition(".")[0]].pattern)


def _write_tensors(path: Path, tensors: Tensors) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    except RuntimeError as error:
        raise ValueError(f"{error}") from error
    disk.sync_file(path)


def _give_name(aside: Path, folder: Path, step: int) -> Path:
    """Rename to the first free name for `step`, unless the very same is there under one already."""
    attempt = 0
    while True:
        path = folder / (f"step-{step}.{attempt}" if attempt else f"step-{step}")
        if path.exists():
            if _same(aside, path):
                disk.remove_tree(aside)
                return path
            attempt += 1
            continue
        disk.rename(aside, path)
        return path


def _same(aside: Path, published: Path) -> bool:
    """Whether both hold the same, whenever and why they were saved, and the published one whole."""
    try:
        verify(published, there := read_manifest(published))
    except CheckpointError:
        return False
    return (
        msgspec.structs.replace(read_manifest(aside), time=there.time, reason=there.reason) == there
    )


def _saved_at(path: Path) -> float | None:
    try:
        return read_manifest(path).time
    except CheckpointError:
        return None


def _later_than_all(folder: Path) -> float:
    """Now, or a moment after the last save if the clock was set back since."""
    last = max(
        (at for path in folder.glob("step-*") if (at := _saved_at(path)) is not None), default=0.0
    )
    return max(time.time(), math.nextafter(last, math.inf))
