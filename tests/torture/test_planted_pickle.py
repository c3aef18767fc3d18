"""A pickle in the place of any file: nothing is unpickled, and the error is one of Instar's own."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import figures
import pytest
import torch
from tiny_run import Place, codes, output_of

from instar.checkpoint.listing import latest_checkpoint
from instar.checkpoint.manifest import CheckpointError, Manifest, encode_manifest, file_entry
from instar.checkpoint.store import load_checkpoint

PLANTED = figures.times(2, 1000)
"""files that the command line is tried on; there are fewer than a thousand"""


class Payload:
    """What runs a command where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.command = f"touch {canary}"

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def as_pickle(canary: Path) -> bytes:
    return pickle.dumps(Payload(canary))


def as_torch_file(canary: Path) -> bytes:
    """The zip archive that `torch.load` would open."""
    file = io.BytesIO()
    torch.save({"weight": torch.ones(3), "payload": Payload(canary)}, file)
    return file.getvalue()


def as_numpy_file(canary: Path) -> bytes:
    """An array of objects, as `numpy.load(allow_pickle=True)` would open it."""
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header = header.ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + as_pickle(canary)


def as_yaml(canary: Path) -> bytes:
    """A tag that an unsafe YAML loader carries out."""
    return f"name: !!python/object/apply:os.system ['touch {canary}']\n".encode()


FORMS = (as_pickle, as_torch_file, as_numpy_file, as_yaml)


@pytest.fixture(scope="module")
def intact_place(data_dir: Path, forks: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    shutil.copytree(data_dir, path, dirs_exist_ok=True)
    place = Place(path, forks)  # type: ignore[arg-type]
    ranks = place.train(path / "run", "train.until=[4it]", ranks=2)
    assert codes(ranks) == [0, 0], output_of(ranks)
    return path


@pytest.mark.parametrize("form", FORMS[:3])
def test_the_payloads_are_alive(form: Callable[[Path], bytes], tmp_path: Path) -> None:
    """Each does touch its canary where somebody is careless enough."""
    canary, content = tmp_path / "canary", form(tmp_path / "canary")
    if zipfile.is_zipfile(io.BytesIO(content)):
        torch.load(io.BytesIO(content), weights_only=False)
    else:
        pickle.loads(content[content.find(b"\x80\x04") :])  # noqa: S301
    assert canary.exists()


def plantings(intact_place: Path, folder: Path) -> Iterator[tuple[Path, Path]]:
    """A working directory with one file replaced, and that file relative to it."""
    files = sorted(
        path.relative_to(intact_place) for path in intact_place.rglob("*") if path.is_file()
    )
    read = [f for f in files if not f.name.startswith(("said-", "rank_"))]
    assert {f.name for f in read} >= {
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "latest",
        "rank-1.safetensors",
        "tokenizer.json",
        "dataset.json",
        "train-00000.safetensors",
        "run.yaml",
    }
    for number, file in enumerate(read):
        base = folder / f"{number}"
        shutil.copytree(intact_place, base)
        target = base / file
        target.chmod(0o644)
        yield base, file
        shutil.rmtree(base)


def test_no_reader_of_a_checkpoint_unpickles(intact_place: Path, tmp_path: Path) -> None:
    """Also where the manifest vouches for the file: it is no secret how to make one."""
    canary = tmp_path / "canary"
    trials, other_errors = 0, []
    for base, file in plantings(intact_place, tmp_path):
        for form in FORMS:
            (base / file).write_bytes(form(canary))
            for with_checksum in (False, True):
                trials += 1
                try:
                    newest = latest_checkpoint(base / "run")
                    if with_checksum:
                        vouch(newest)
                    checkpoint = load_checkpoint(newest)
                    for component in checkpoint.components:
                        checkpoint.tensors(component)
                except CheckpointError:
                    pass
                except Exception as error:
                    other_errors.append(f"{file} {form.__name__}: {error!r}")
    figures.write(
        "planted-pickle",
        [
            figures.none_of(trials, "pickle planted and read: executions", [*ran(canary)]),
            figures.none_of(
                trials, "pickle planted and read: other errors than ours", other_errors
            ),
        ],
    )


def test_no_command_unpickles(intact_place: Path, place: Place) -> None:
    canary = place.path / "canary"
    trials, other_errors = 0, []
    for base, file in plantings(intact_place, place.path / "planted"):
        if trials >= PLANTED:
            break
        trials += 1
        (base / file).write_bytes(FORMS[trials % len(FORMS)](canary))
        target_place = Place(base, place.forks)
        for command in (
            target_place.resume(Path("run"), "--until", "6it"),
            target_place.instar("sample", "run", "--tokens", "4"),
            target_place.instar("checkpoint", "verify", "run"),
        ):
            (child,) = command
            code = child.finish()
            if code not in (0, 2, 3, 4) or "Traceback" in child.output():
                other_errors.append(f"{file}: {code} {child.output()}")
    figures.write(
        "planted-pickle-commands",
        [
            figures.none_of(trials, "pickle planted, three commands: executions", [*ran(canary)]),
            figures.none_of(trials, "pickle planted, three commands: a traceback", other_errors),
        ],
    )


def ran(canary: Path) -> Iterator[str]:
    if canary.exists():
        yield "the payload ran"


def vouch(folder: Path) -> None:
    """Write a manifest that says of every file what is there now."""
    manifest = load_checkpoint(folder, check=False).manifest
    files = {
        name: file_entry(folder / name, entry.pattern) for name, entry in manifest.files.items()
    }
    fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    (folder / "manifest.json").write_bytes(encode_manifest(Manifest(**{**fields, "files": files})))
