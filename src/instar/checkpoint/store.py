"""Checkpoints: published whole or not at all, verified when read.

```
checkpoints/step-<n>/
  manifest.json        written last: every file's size and xxh3-128, architecture, history, versions
  model.safetensors    one copy of every parameter, under the name the model gives it
  optimizer.safetensors, ema.safetensors  other components, where the run has them
  state.json           everything else that the run must remember
checkpoints/latest     the name of the newest one
```

A checkpoint is never changed or replaced: a second save of step 2000 that differs from the first
is called `step-2000.1`, so that whatever points to a checkpoint keeps its meaning. `safetensors`
and `json` are enough to read one.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instar.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    describe,
    encode_json,
    encode_manifest,
    read_json,
    read_manifest,
    verify,
)
from instar.record.events import from_words
from instar.record.rundir import find_run
from instar.record.system import versions

if TYPE_CHECKING:
    import torch

SUFFIX = ".safetensors"
STATE = "state.json"
LATEST = "latest"
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
        files = (Path(name) for name in self.manifest.files)
        return tuple(file.stem for file in files if file.suffix == SUFFIX)

    def tensors(self, component: str = "model", device: str = "cpu") -> dict[str, torch.Tensor]:
        """A component's tensors by name. A tied head is there once, under the name of the table
        it shares.

        Raises:
            CheckpointError: the file is not a safetensors file, or its size is another now.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.path / f"{component}{SUFFIX}"
        try:
            return load_file(path, device=device)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from error


def publish(
    root: Path,
    step: int,
    components: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, Any],
    *,
    architecture: Mapping[str, Any],
    history: Sequence[Any] = (),
) -> Path:
    """Save `components` and `state` under the run directory `root` and return the checkpoint's folder.

    When this returns it is on the disk and `latest` names it. Whatever happens before that, it is
    there whole or not at all, and `latest` names a whole one.

    `components` are `model`, and whatever else has tensors (`optimizer`, `ema`); the model's are
    what `dict(model.named_parameters())` gives, and persistent buffers: every tensor once. `state_dict()` would not do: it has tied tensors twice, which safetensors refuses.
    `state`, `architecture` and `history` are JSON values; tuples come back as lists.

    Raises:
        ValueError: a name carries a wrapper's prefix, or two tensors share memory.
        TypeError: a value that JSON cannot say, or a dictionary key that is not a string.
        CheckpointError: it cannot be written (disk full, no permission).
    """
    for name in (name for tensors in components.values() for name in tensors):
        if name.startswith(_WRAPPERS):
            raise ValueError(f"save the model that was wrapped, not its wrapper: {name!r}")
    patterns = {f"{component}{SUFFIX}": "REPLICATED" for component in components} | {
        STATE: "GLOBAL"
    }
    folder = root / "checkpoints"
    aside = folder / f".tmp-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        aside.mkdir()
        for component, tensors in components.items():
            _write_tensors(aside / f"{component}{SUFFIX}", tensors)
        write_synced(aside / STATE, encode_json(state))
        manifest = Manifest(
            step=step,
            files={name: describe(aside / name, pattern) for name, pattern in patterns.items()},
            architecture=dict(architecture),
            history=list(history),
            versions=versions(),
        )
        write_synced(aside / MANIFEST, encode_manifest(manifest))
        sync_folder(aside)
        path = _give_name(aside, folder, step)
        for parent in (folder, root, root.parent):
            sync_folder(parent)
        replace_file(folder / LATEST, path.name.encode() + b"\n")
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"cannot save step {step:,} in {folder}: {error}") from error
    except Exception:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return path


def load(path: Path, *, check: bool = True) -> Checkpoint:
    """The checkpoint in the folder `path`; unless told otherwise, every byte of it is checked.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    manifest = read_manifest(path)
    if check:
        verify(path, manifest)
    return Checkpoint(path, manifest, from_words(read_json(path / STATE)))


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
    root = path if (path / "checkpoints").is_dir() else find_run(text, out_dir).path
    return latest(root)


def latest(root: Path) -> Path:
    """The newest checkpoint of the run in `root`: what `latest` names, else the highest step.

    Raises:
        CheckpointError: there is none.
    """
    folder = root / "checkpoints"
    try:
        named = (folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        named = ""
    if _NAME.fullmatch(named) and (folder / named / MANIFEST).is_file():
        return folder / named
    whole = [path for path in folder.glob("step-*") if (path / MANIFEST).is_file()]
    ordered = sorted((order, path) for path in whole if (order := _order(path)))
    if not ordered:
        raise CheckpointError(f"no checkpoint in {folder}")
    return ordered[-1][1]


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk; its name is safe after `sync_folder`."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file so that every reader, also after a crash, sees all of the old or of the new."""
    aside = path.with_name(f".tmp-{secrets.token_hex(8)}")
    try:
        write_synced(aside, content)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove what a crash left unpublished: a run has one writer, so nobody is writing it now."""
    for left_behind in folder.glob(".tmp-*"):
        if left_behind.is_dir():
            shutil.rmtree(left_behind)
        else:
            left_behind.unlink()


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    except RuntimeError as error:
        raise ValueError(f"{error}") from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _give_name(aside: Path, folder: Path, step: int) -> Path:
    """Rename to the first free name for `step`, unless the very same is there under one already."""
    attempt = 0
    while True:
        path = folder / (f"step-{step}.{attempt}" if attempt else f"step-{step}")
        if path.exists():
            if _same(aside, path):
                shutil.rmtree(aside)
                return path
            attempt += 1
            continue
        aside.rename(path)
        return path


def _same(aside: Path, published: Path) -> bool:
    """Whether the manifests are equal, and the published one is still true."""
    try:
        verify(published, there := read_manifest(published))
    except CheckpointError:
        return False
    return there == read_manifest(aside)


def _order(path: Path) -> tuple[int, int] | None:
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else None
