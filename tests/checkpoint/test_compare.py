from __future__ import annotations

import math
import os
import re
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from instar.checkpoint.compare import compare_tensors, verify_checkpoint
from instar.checkpoint.manifest import CheckpointError, FileEntry, encode_manifest, read_manifest
from instar.checkpoint.store import CheckpointContent, load_checkpoint, publish_checkpoint


def save(root: Path, tensors: dict[str, Tensor], **components: dict[str, Tensor]) -> Path:
    weights = {name: tensor.clone() for name, tensor in tensors.items()}
    return publish_checkpoint(
        root, 5, CheckpointContent({"model": weights, **components}, {"cursor": 40}, {})
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    weights = {"w": torch.randn(64, 64), "b": torch.randn(64)}
    return save(tmp_path, weights, optimizer={"w/exp_avg": torch.zeros(64, 64)})


def test_a_whole_checkpoint_is_said_to_be(checkpoint: Path) -> None:
    report = verify_checkpoint(checkpoint)
    assert (report.broken, report.extra_files) == ((), ())
    files = [path for path in checkpoint.iterdir() if path.name != "manifest.json"]
    assert report.size_bytes == sum(path.stat().st_size for path in files)
    assert report.bytes_per_s == report.size_bytes / report.seconds


def test_every_broken_file_is_named_not_only_the_first(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)
    (checkpoint / "optimizer.safetensors").unlink()
    (checkpoint / "state.json").write_bytes(b"")
    faults = verify_checkpoint(checkpoint).broken
    assert len(faults) == 3
    for name, wrong in [
        ("model.safetensors", "its checksum does not match"),
        ("optimizer.safetensors", "missing"),
        ("state.json", "0 bytes, but"),
    ]:
        assert any(name in fault and wrong in fault for fault in faults)


def test_files_that_change_places_are_found(checkpoint: Path) -> None:
    a, b = checkpoint / "model.safetensors", checkpoint / "optimizer.safetensors"
    a.rename(checkpoint / "aside")
    b.rename(a)
    (checkpoint / "aside").rename(b)
    assert len(verify_checkpoint(checkpoint).broken) == 2


def test_a_broken_manifest_is_the_one_fault(checkpoint: Path) -> None:
    manifest = (checkpoint / "manifest.json").read_text().replace('"step": 5', '"step": 6')
    (checkpoint / "manifest.json").write_text(manifest)
    (fault,) = verify_checkpoint(checkpoint).broken
    assert "manifest.json: content has changed" in fault


def test_a_file_that_nobody_saved_is_pointed_out(checkpoint: Path) -> None:
    (checkpoint / "rng").mkdir()
    (checkpoint / "rng/rank-9.safetensors").touch()
    report = verify_checkpoint(checkpoint)
    assert (report.broken, report.extra_files) == ((), ("rng/rank-9.safetensors",))


@pytest.mark.parametrize(
    "name",
    [
        "../../dev/zero",
        "/dev/zero",
        "model/../../x",
        "..",
        ".",
        "",
        "rng/../x",
        "rng//b",
        "rng/a/b",
        "notes.txt",
        ".model",
        "model.safetensors\n",
        "model\x00.safetensors",
    ],
)
def test_a_manifest_names_no_files_but_those_of_a_checkpoint(checkpoint: Path, name: str) -> None:
    manifest = read_manifest(checkpoint)
    files = manifest.files | {name: FileEntry(0, "", "REPLICATED")}
    text = encode_manifest(msgspec.structs.replace(manifest, files=files))
    (checkpoint / "manifest.json").write_bytes(text)
    (fault,) = verify_checkpoint(checkpoint).broken
    assert f"{name!r} is not the name of a file" in fault
    with pytest.raises(CheckpointError, match="is not the name of a file"):
        compare_tensors(checkpoint, checkpoint)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1),
        ("step", 10**25),
        ("time", 1e300),
        ("time", -1.0),
        ("world_size", 10**4000),
        ("files", {"model.safetensors": FileEntry(10**4000, "", "REPLICATED")}),
    ],
)
def test_a_number_that_no_checkpoint_has_is_a_fault(
    checkpoint: Path, field: str, value: object
) -> None:
    manifest = read_manifest(checkpoint)
    text = encode_manifest(msgspec.structs.replace(manifest, **{field: value}))
    (checkpoint / "manifest.json").write_bytes(text)
    assert ["not a manifest" in fault for fault in verify_checkpoint(checkpoint).broken] == [True]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_a_file_of_a_checkpoint_that_is_no_file_is_a_fault(
    checkpoint: Path, tmp_path: Path, name: str, kind: str
) -> None:
    path = checkpoint / name
    path.rename(tmp_path / "mine")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "mine")
    (fault,) = verify_checkpoint(checkpoint).broken
    assert str(path) in fault
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load_checkpoint(checkpoint)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load_checkpoint(checkpoint, check=False).tensors()


def test_tensors_are_same_changed_or_only_in_one(tmp_path: Path) -> None:
    shared = torch.tensor([3.0, 4.0])
    a = {"same": shared, "moved": shared, "only_a": shared, "wider": torch.ones(2, 3)}
    a |= {"turned": torch.ones(2, dtype=torch.complex64)}
    b = {"same": shared, "moved": torch.tensor([3.0, 4.5]), "wider": torch.ones(2, 4)}
    b |= {"turned": torch.ones(2) + 1j}
    b |= {"only_b": shared}
    files = compare_tensors(save(tmp_path / "a", a), save(tmp_path / "b", b))
    assert list(files) == ["model.safetensors"]
    by_name = {tensor.name: tensor for tensor in files["model.safetensors"]}
    verdicts = {name: tensor.verdict for name, tensor in by_name.items()}
    assert verdicts == {
        "same": "same",
        "moved": "changed",
        "only_a": "only_a",
        "wider": "changed",
        "turned": "changed",
        "only_b": "only_b",
    }
    assert (by_name["turned"].max_abs, by_name["turned"].relative_l2) == (1.0, 1.0)
    assert by_name["moved"].max_abs == 0.5
    assert by_name["moved"].relative_l2 == pytest.approx(0.1)
    assert (by_name["wider"].max_abs, by_name["wider"].relative_l2) == (None, None)
    assert by_name["wider"].b is not None
    assert by_name["wider"].b.shape == (2, 4)
    assert by_name["only_a"].b is None


def test_bits_decide_not_values(tmp_path: Path) -> None:
    nan = torch.tensor([math.nan, 1.0])
    a = {"nan": nan, "zero": torch.tensor([0.0]), "half": torch.ones(2)}
    b = {"nan": nan, "zero": torch.tensor([-0.0]), "half": torch.ones(2, dtype=torch.bfloat16)}
    files = compare_tensors(save(tmp_path / "a", a), save(tmp_path / "b", b))
    by_name = {tensor.name: tensor for tensor in files["model.safetensors"]}
    assert by_name["nan"].verdict == "same"
    assert (by_name["zero"].verdict, by_name["zero"].relative_l2) == ("changed", 0.0)
    assert (by_name["half"].verdict, by_name["half"].max_abs) == ("changed", 0.0)


@pytest.mark.parametrize(
    ("a", "b", "max_abs", "relative"),
    [
        (torch.zeros(2), torch.ones(2), 1.0, math.inf),
        (torch.tensor(2), torch.tensor(3), 1.0, 0.5),
        (torch.ones(2), torch.tensor([math.nan, 1.0]), math.nan, math.nan),
    ],
)
def test_odd_distances(
    tmp_path: Path, a: Tensor, b: Tensor, max_abs: float, relative: float
) -> None:
    files = compare_tensors(save(tmp_path / "a", {"x": a}), save(tmp_path / "b", {"x": b}))
    (difference,) = files["model.safetensors"]
    assert difference.max_abs == pytest.approx(max_abs, nan_ok=True)
    assert difference.relative_l2 == pytest.approx(relative, nan_ok=True)


def test_a_component_that_only_one_has_is_all_its_own(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"w": torch.ones(2)}, ema={"w": torch.ones(2)})
    b = save(tmp_path / "b", {"w": torch.ones(2)})
    files = compare_tensors(a, b)
    assert [tensor.verdict for tensor in files["ema.safetensors"]] == ["only_a"]
    assert [tensor.verdict for tensor in files["model.safetensors"]] == ["same"]


def test_a_torn_file_is_named(tmp_path: Path, checkpoint: Path) -> None:
    other = save(tmp_path / "b", {"w": torch.ones(2)})
    (other / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"step-5/model\.safetensors: not a safetensors file"):
        compare_tensors(checkpoint, other)
