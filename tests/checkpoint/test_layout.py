"""Components in several files: any rows are read from whatever files have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from instar.checkpoint.inspect import check
from instar.checkpoint.layout import layout
from instar.checkpoint.manifest import CheckpointError, Facts, Manifest, Part
from instar.checkpoint.store import Checkpoint, CheckpointWriter, load
from instar.distributed.shards import SavedRows

WHOLE = {
    "weight": torch.arange(21.0).view(7, 3),
    "bias": torch.arange(7.0),
    "one": torch.ones(1, 2),
}
COUNT = torch.tensor(5)
SHARDS = 4


def rows_of(shard: int) -> dict[str, torch.Tensor | SavedRows]:
    """What a rank of four saves: two rows of seven, one, or none; and what is not divided."""
    found: dict[str, torch.Tensor | SavedRows] = {"count": COUNT}
    for name, tensor in WHOLE.items():
        each = -(-len(tensor) // SHARDS)
        first = min(len(tensor), shard * each)
        found[name] = SavedRows(
            tensor[first : first + each], first, tuple(tensor.shape), shard, SHARDS, saved=True
        )
    return found


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoint:
    """Four ranks write, one after another, and the first publishes what all have written."""
    writers = [CheckpointWriter(tmp_path, 3) for _ in range(SHARDS)]
    writers[0].open()
    for rank, writer in enumerate(writers):
        writer.temporary = writers[0].temporary
        writer.write({"model": rows_of(rank)}, {}, rank)
        writers[0].files.update(writer.files)
    path = writers[0].publish(architecture={}, history=[], facts=Facts(), world_size=SHARDS)
    return load(path)


def test_every_rank_has_a_file_with_its_rows(saved: Checkpoint) -> None:
    files = {name: entry for name, entry in saved.manifest.files.items() if name != "state.json"}
    assert list(files) == [f"model/{shard}-of-4.safetensors" for shard in range(SHARDS)]
    assert {entry.pattern for entry in files.values()} == {"SHARDED"}
    assert files["model/3-of-4.safetensors"].parts == {
        "weight": Part(6, 7, (7, 3)),
        "bias": Part(6, 7, (7,)),
    }
    assert saved.components == ("model",)
    entries = saved.layout("model").entries
    assert {name: entry.shape for name, entry in entries.items()} == {
        "weight": (7, 3),
        "bias": (7,),
        "one": (1, 2),
        "count": (),
    }


def test_any_rows_are_read_from_whatever_files_have_them(saved: Checkpoint) -> None:
    with saved.reading("model") as read:
        for first in range(8):
            for last in range(first, 8):
                assert torch.equal(read.rows("weight", first, last), WHOLE["weight"][first:last])
    assert all(torch.equal(saved.tensors("model")[name], WHOLE[name]) for name in WHOLE)
    assert saved.tensors("model")["count"] == 5


def test_a_replica_saves_nothing(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 3)
    writer.open()
    first = rows_of(1)["weight"]
    assert isinstance(first, SavedRows)
    replica = replace(first, saved=False)
    assert replica.staged().tensor.numel() == 0
    writer.write({"model": {"weight": replica}}, {}, 3)
    assert writer.files == {}


def test_damage_is_found_by_name(saved: Checkpoint) -> None:
    file = saved.path / "model" / "2-of-4.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (broken,) = check(saved.path).broken
    assert "model/2-of-4.safetensors: content has changed" in broken


def changed(saved: Checkpoint, file: str, parts: Mapping[str, Part]) -> Manifest:
    entry = msgspec.structs.replace(saved.manifest.files[file], parts=dict(parts))
    files = {**saved.manifest.files, file: entry}
    return msgspec.structs.replace(saved.manifest, files=files)


@pytest.mark.parametrize(
    ("part", "said"),
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
    saved: Checkpoint, part: Part, said: str
) -> None:
    file = "model/1-of-4.safetensors"
    parts = saved.manifest.files[file].parts
    with pytest.raises(CheckpointError, match=said):
        layout(saved.path, changed(saved, file, {**parts, "weight": part}), "model")


def test_a_lost_file_is_noticed_by_its_rows(saved: Checkpoint) -> None:
    files = dict(saved.manifest.files)
    del files["model/3-of-4.safetensors"]
    with pytest.raises(CheckpointError, match="rows 6 to 7 of bias are missing"):
        layout(saved.path, msgspec.structs.replace(saved.manifest, files=files), "model")


def test_a_manifest_of_whole_files_has_no_rows(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 3)
    writer.open()
    writer.write({"model": WHOLE}, {}, 0)
    assert b"parts" not in msgspec.json.encode(writer.files)
    save_file(WHOLE, tmp_path / "same")
    written = writer.temporary / "model.safetensors"
    assert written.read_bytes() == (tmp_path / "same").read_bytes()
