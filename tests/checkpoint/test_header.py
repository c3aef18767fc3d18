from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from instar.checkpoint.layout import TensorEntry, check_shapes, read_header
from instar.checkpoint.manifest import CheckpointError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {
        "weight": torch.ones(3, 4),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "step": torch.tensor(7),
        "none": torch.ones(0, 5),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_types_shapes_and_sizes_are_read(file: Path) -> None:
    entries = read_header(file)
    assert entries["weight"] == TensorEntry("F32", (3, 4), 48)
    assert entries["half"] == TensorEntry("BF16", (2,), 4)
    assert entries["step"] == TensorEntry("I64", (), 8)
    assert (entries["step"].elements, entries["none"].elements) == (1, 0)
    assert entries.keys() == {"weight", "half", "step", "none"}


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("weight", (4, 3), r"weight must have the shape \(4, 3\), and is \(3, 4\)"),
        ("bias", (3,), r"bias must have the shape \(3,\), and is missing"),
    ],
)
def test_tensors_must_fit(file: Path, name: str, shape: tuple[int, ...], message: str) -> None:
    headers = read_header(file)
    check_shapes(file.parent, headers, {"half": (2,)})
    with pytest.raises(CheckpointError, match=message):
        check_shapes(file.parent, headers, {"half": (2,), name: shape})


def with_header(path: Path, text: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"not json",
        b'{"w": 1}',
        b"\xff\xfe\xfd",
        b'{"w": {"dtype": "F32", "shape": ["a"], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [1]}}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_safetensors_file_is_refused_by_name(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"odd\.safetensors: not a safetensors file"):
        read_header(with_header(tmp_path / "odd.safetensors", text))


@pytest.mark.parametrize("length", [0, 1, 2**40, 2**64 - 1])
def test_a_length_that_cannot_be_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_header(path)


def test_a_file_that_ends_too_early_is_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="ends too early"):
        read_header(file)
    file.write_bytes(b"\x01\x02")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_header(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.safetensors: No such file"):
        read_header(tmp_path / "none.safetensors")


def test_tensors_come_as_they_lie_in_the_file(tmp_path: Path) -> None:
    entries = {
        "second": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]},
        "first": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
    }
    path = with_header(tmp_path / "x.safetensors", json.dumps(entries).encode())
    path.write_bytes(path.read_bytes() + b"ab")
    assert list(read_header(path)) == ["first", "second"]
