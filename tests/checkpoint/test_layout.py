"""Components in several files: any rows are read from whatever files have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import in_parts
import msgspec
import pytest
import torch
from forks import Forks
from safetensors.torch import save_file

from instar.checkpoint.compare import verify_checkpoint
from instar.checkpoint.layout import SavedRows, TensorEntry, component_layout, encode_header
from instar.checkpoint.manifest import CheckpointError, Facts, Manifest, Part, encode_manifest
from instar.checkpoint.store import Checkpoint, CheckpointWriter, load_checkpoint, tensors_to_write

WHOLE = {
    "weight": torch.arange(21.0).view(7, 3),
    "bias": torch.arange(7.0),
    "one": torch.ones(1, 2),
}
COUNT = torch.tensor(5)
SHARDS = 4


def rows_of(shard: int) -> dict[str, torch.Tensor | SavedRows]:
    """What a rank of four saves: two rows of seven, one, or none; and what is not divided."""
    tensors: dict[str, torch.Tensor | SavedRows] = {"count": COUNT}
    for name, tensor in WHOLE.items():
        height = -(-len(tensor) // SHARDS)
        first = min(len(tensor), shard * height)
        tensors[name] = SavedRows(
            tensor[first : first + height], first, tuple(tensor.shape), shard, SHARDS, saved=True
        )
    return tensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Four ranks write, one after another, and the first publishes what all have written."""
    writers = [CheckpointWriter(tmp_path, 3) for _ in range(SHARDS)]
    writers[0].open()
    for rank, writer in enumerate(writers):
        writer.temporary = writers[0].temporary
        writer.write({"model": rows_of(rank)}, {}, rank)
        writers[0].files.update(writer.files)
    path = writers[0].publish(architecture={}, history=[], facts=Facts(), world_size=SHARDS)
    return load_checkpoint(path)


def test_every_rank_has_a_file_with_its_rows(checkpoint: Checkpoint) -> None:
    files = {
        name: entry for name, entry in checkpoint.manifest.files.items() if name != "state.json"
    }
    assert list(files) == [f"model/{shard}-of-4.safetensors" for shard in range(SHARDS)]
    assert {entry.pattern for entry in files.values()} == {"SHARDED"}
    assert files["model/3-of-4.safetensors"].parts == {
        "weight": Part(6, 7, (7, 3)),
        "bias": Part(6, 7, (7,)),
    }
    assert checkpoint.components == ("model",)
    entries = checkpoint.layout("model").entries
    assert {name: entry.shape for name, entry in entries.items()} == {
        "weight": (7, 3),
        "bias": (7,),
        "one": (1, 2),
        "count": (),
    }


def test_any_rows_are_read_from_whatever_files_have_them(checkpoint: Checkpoint) -> None:
    with checkpoint.reading("model") as read:
        for first in range(8):
            for last in range(first, 8):
                assert torch.equal(read.rows("weight", first, last), WHOLE["weight"][first:last])
    assert all(torch.equal(checkpoint.tensors("model")[name], WHOLE[name]) for name in WHOLE)
    assert checkpoint.tensors("model")["count"] == 5


def test_a_replica_saves_nothing(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 3)
    writer.open()
    first = rows_of(1)["weight"]
    assert isinstance(first, SavedRows)
    replica = replace(first, saved=False)
    assert tensors_to_write({"weight": replica}) == {}
    writer.write({"model": {"weight": replica}}, {}, 3)
    assert writer.files == {}


def test_damage_is_found_by_name(checkpoint: Checkpoint) -> None:
    file = checkpoint.path / "model" / "2-of-4.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (broken,) = verify_checkpoint(checkpoint.path).broken
    assert "model/2-of-4.safetensors: content has changed" in broken


def with_parts(checkpoint: Checkpoint, file: str, parts: Mapping[str, Part]) -> Manifest:
    entry = msgspec.structs.replace(checkpoint.manifest.files[file], parts=dict(parts))
    files = {**checkpoint.manifest.files, file: entry}
    return msgspec.structs.replace(checkpoint.manifest, files=files)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Part(3, 5, (7, 3)), "row 2 of weight is missing"),
        (Part(1, 3, (7, 3)), "row 1 of weight is also in model/1-of-4"),
        (Part(2, 4, (8, 3)), "has rows of weight as F32"),
        (Part(2, 5, (7, 3)), "and the manifest says rows 2 to 5"),
        (Part(4, 2, (7, 3)), "and the manifest says rows 4 to 2"),
        (Part(2, 4, ()), "and the manifest says"),
    ],
)
def test_what_a_manifest_says_of_rows_is_not_trusted(
    checkpoint: Checkpoint, part: Part, message: str
) -> None:
    file = "model/1-of-4.safetensors"
    parts = checkpoint.manifest.files[file].parts
    with pytest.raises(CheckpointError, match=message):
        component_layout(
            checkpoint.path, with_parts(checkpoint, file, {**parts, "weight": part}), "model"
        )


@pytest.mark.parametrize(
    ("missing", "extra", "message"),
    [
        ("model/3-of-4", "", "model/3-of-4.safetensors: not in the manifest"),
        ("model/0-of-4", "model", "model/0-of-4.safetensors: not in the manifest"),
        ("", "model", "model.safetensors: not a part of the model"),
        ("", "model/4-of-4", "model/4-of-4.safetensors: not a part of the model"),
        ("", "model/0-of-999999999", "model/1-of-999999999.safetensors: not in the manifest"),
        ("", "model/0-of-99999999999", "model/0-of-99999999999.safetensors: not a part of the"),
        ("", "model/00-of-4", "model/00-of-4.safetensors: not a part of the model"),
    ],
)
def test_a_missing_file_and_one_too_many_are_named(
    checkpoint: Checkpoint, missing: str, extra: str, message: str
) -> None:
    files = dict(checkpoint.manifest.files)
    if extra:
        files[f"{extra}.safetensors"] = files["model/3-of-4.safetensors"]
    files.pop(f"{missing}.safetensors", None)
    with pytest.raises(CheckpointError, match=message):
        component_layout(
            checkpoint.path, msgspec.structs.replace(checkpoint.manifest, files=files), "model"
        )


@pytest.mark.parametrize("name", ["model/../x", "model/..", "/etc/passwd", "model/0-of-4/x", "m/0"])
def test_no_path_leads_out_of_the_folder(checkpoint: Checkpoint, name: str) -> None:
    files = {
        **checkpoint.manifest.files,
        name: checkpoint.manifest.files["model/0-of-4.safetensors"],
    }
    manifest = msgspec.structs.replace(checkpoint.manifest, files=files)
    (checkpoint.path / "manifest.json").write_bytes(encode_manifest(manifest))
    with pytest.raises(CheckpointError, match="is not the name of a file of a checkpoint"):
        load_checkpoint(checkpoint.path)


def test_a_link_in_place_of_a_file_is_not_followed(checkpoint: Checkpoint) -> None:
    file = checkpoint.path / "model" / "1-of-4.safetensors"
    file.rename(checkpoint.path.parent / "elsewhere")
    file.symlink_to(checkpoint.path.parent / "elsewhere")
    with pytest.raises(CheckpointError, match=r"model/1-of-4\.safetensors: a symbolic link"):
        load_checkpoint(checkpoint.path)
    with pytest.raises(CheckpointError, match="1-of-4"), checkpoint.reading("model") as read:
        read.rows("weight", 2, 3)


def test_rows_that_a_header_only_claims_are_not_allocated(checkpoint: Checkpoint) -> None:
    rows, last = 1 << 62, "model/3-of-4.safetensors"
    header = {"bias": TensorEntry("F32", (1,), 4), "weight": TensorEntry("F32", (rows - 6, 3), 12)}
    (checkpoint.path / last).write_bytes(encode_header(header) + bytes(16))
    files = dict(checkpoint.manifest.files)
    for name in (name for name in files if name.startswith("model")):
        parts = dict(files[name].parts)
        parts["weight"] = Part(parts["weight"].first, parts["weight"].last, (rows, 3))
        if name == last:
            parts["weight"] = Part(6, rows, (rows, 3))
        files[name] = msgspec.structs.replace(files[name], parts=parts)
    forgery = Checkpoint(
        checkpoint.path, msgspec.structs.replace(checkpoint.manifest, files=files), {}
    )
    with pytest.raises(CheckpointError, match=r"model/3-of-4\.safetensors: "):
        forgery.tensors()


def test_a_rank_reads_its_rows_alone(forks: Forks, tmp_path: Path) -> None:
    path = in_parts.save_linears(tmp_path)
    child = forks.start("in_parts:load_a_quarter", str(path), place=tmp_path)
    assert child.finish() == 0, child.output()
    largest = 16
    share = 3 * in_parts.LAYERS * largest / 4
    assert share - 4 < float(child.output().splitlines()[-1]) < share + largest


def test_a_manifest_of_whole_files_has_no_rows(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 3)
    writer.open()
    writer.write({"model": WHOLE}, {}, 0)
    assert b"parts" not in msgspec.json.encode(writer.files)
    save_file(WHOLE, tmp_path / "same")
    file = writer.temporary / "model.safetensors"
    assert file.read_bytes() == (tmp_path / "same").read_bytes()
