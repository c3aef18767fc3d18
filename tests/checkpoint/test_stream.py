"""Files of tensors written one by one are those of the format's own writer."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from instar.checkpoint import tensor_file
from instar.checkpoint.layout import file_layout, open_reader
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import CheckpointContent, publish_checkpoint
from instar.checkpoint.tensor_file import (
    DTYPES,
    DirectFile,
    Outline,
    allocate,
    open_direct,
    outlines,
    write_tensors,
)

TENSORS = {
    "weight/exp_avg": torch.arange(6.0).view(2, 3),
    "weight/step": torch.tensor(20.0),
    "Ümläut \"quoted\"": torch.ones(3, dtype=torch.uint8),
    "empty": torch.zeros(0, 4),
    "odd": torch.zeros(5, dtype=torch.bfloat16),
    **{f"of {word}": torch.ones(3, 1, dtype=dtype) for word, dtype in DTYPES.items()},
}  # fmt: skip
SHAPES = {name: Outline(tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}


def test_every_byte_is_that_of_save_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "whole")

    write_tensors(tmp_path / "streamed", SHAPES, TENSORS.__getitem__)

    assert (tmp_path / "streamed").read_bytes() == (tmp_path / "whole").read_bytes()


def test_the_checksum_is_that_of_the_file(tmp_path: Path) -> None:
    large = {"large": torch.arange(500_001.0), **TENSORS}
    shapes = {name: Outline.of(tensor) for name, tensor in large.items()}
    digest = write_tensors(tmp_path / "file", shapes, large.__getitem__, {"format": "pt"})
    assert digest == xxhash.xxh3_128_hexdigest((tmp_path / "file").read_bytes())
    save_file(large, tmp_path / "whole", {"format": "pt"})
    assert (tmp_path / "file").read_bytes() == (tmp_path / "whole").read_bytes()


def test_large_files_are_flushed_while_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def flush(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        real(descriptor)

    real = tensor_file._flush
    monkeypatch.setattr(tensor_file, "O_DIRECT", 0)
    monkeypatch.setattr(tensor_file, "_flush", flush)
    monkeypatch.setattr(tensor_file, "_FLUSHED_BYTES", 4 << 20)
    large = {f"w{i}": torch.full((1 << 20,), float(i)) for i in range(16)}
    shapes = {name: Outline.of(tensor) for name, tensor in large.items()}
    digest = write_tensors(tmp_path / "file", shapes, large.__getitem__)
    assert len(sizes) == 16
    assert sizes[0] <= 4 * (4 << 20), "more waited than may"
    assert digest == xxhash.xxh3_128_hexdigest((tmp_path / "file").read_bytes())


LARGE = {
    **{f"w{i}": torch.arange(100_003.0 + 400_000 * (i % 4)) + i for i in range(12)},
    **{f"w{i}/step": torch.tensor(float(i)) for i in range(12)},
    **TENSORS,
}
"""most of them are larger than a buffer, none ends with a block"""


@pytest.fixture
def directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are written past the page cache too, where the file system allows it."""
    monkeypatch.setattr(tensor_file, "_FLUSHED_BYTES", 0)
    monkeypatch.setattr(tensor_file, "_BUFFER_BYTES", 64 << 10)
    monkeypatch.setattr(tensor_file, "_DIRECT_CHUNK_BYTES", 1 << 20)


@pytest.mark.usefixtures("directly")
@pytest.mark.parametrize("block", [4096, 8])
def test_past_the_page_cache_every_byte_is_the_same(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 8 bytes are refused by a disk, so that its file system's pages must take them."""
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", block)
    save_file(LARGE, tmp_path / "whole")
    as_in_file = allocate(LARGE)
    for name, tensor in LARGE.items():
        as_in_file[name].copy_(tensor)
    shapes = {name: Outline.of(tensor) for name, tensor in LARGE.items()}
    for tensors in (LARGE, as_in_file):
        digest = write_tensors(tmp_path / "file", shapes, tensors.__getitem__)
        assert (tmp_path / "file").read_bytes() == (tmp_path / "whole").read_bytes()
        assert digest == xxhash.xxh3_128_hexdigest((tmp_path / "file").read_bytes())


@pytest.mark.usefixtures("directly")
def test_memory_laid_out_as_the_file_is_written_from_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def collect(self: DirectFile, content: np.ndarray, limit: int) -> np.ndarray:
        sizes.append(min(len(content), limit))
        return real(self, content, limit)

    real = DirectFile._collect
    monkeypatch.setattr(DirectFile, "_collect", collect)
    if open_direct(tmp_path / "tried") is None:
        pytest.skip("this file system has no direct writes")
    tensors = allocate(LARGE)
    shapes = {name: Outline.of(tensor) for name, tensor in LARGE.items()}
    write_tensors(tmp_path / "file", shapes, tensors.__getitem__)
    assert 0 < sum(sizes) < sum(tensor.nbytes for tensor in LARGE.values()) / 50


@pytest.mark.usefixtures("directly")
@pytest.mark.parametrize("odd", [0, 1000])
def test_a_disk_that_is_full_in_the_middle_of_a_file_is_an_error(odd: int, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    shapes = {name: Outline.of(tensor) for name, tensor in LARGE.items()}
    for tensors in (LARGE, allocate(LARGE)):
        resource.setrlimit(resource.RLIMIT_FSIZE, ((1 << 20) + odd, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                write_tensors(tmp_path / "file", shapes, tensors.__getitem__)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [thread for thread in threading.enumerate() if "direct-io" in thread.name]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, dtype=torch.complex128), "w has dtype torch.complex128"),
        (torch.eye(2).to_sparse(), "w is a sparse tensor"),
        (TENSORS["weight/exp_avg"][1], "share memory"),
    ],
)
def test_what_the_format_cannot_hold_is_named(
    tensor: torch.Tensor, message: str, tmp_path: Path
) -> None:
    tensors = {**TENSORS, "w": tensor}
    with pytest.raises(ValueError, match=message):
        publish_checkpoint(tmp_path, 1, CheckpointContent({"model": tensors}, {}, {}))


def test_a_view_is_written_as_what_it_shows(tmp_path: Path) -> None:
    view = torch.arange(12.0).view(3, 4).T[1:]
    write_tensors(tmp_path / "file", {"view": Outline(view.dtype, (3, 3))}, lambda _: view)
    assert torch.equal(load_file(tmp_path / "file")["view"], view)


def test_every_tensor_is_asked_for_once(tmp_path: Path) -> None:
    names: list[str] = []

    def read(name: str) -> torch.Tensor:
        names.append(name)
        return TENSORS[name]

    write_tensors(tmp_path / "file", SHAPES, read)

    assert sorted(names) == sorted(TENSORS)


def test_outlines_and_tensors_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensors(path, SHAPES, TENSORS.__getitem__)

    assert outlines(file_layout(path)) == SHAPES
    with open_reader(file_layout(path)) as read:
        assert all(torch.equal(read(name), tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("tensor", [torch.zeros(3), torch.zeros(2, dtype=torch.int64)])
def test_a_tensor_that_is_not_as_announced_is_refused(tensor: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="w: "):
        write_tensors(tmp_path / "file", {"w": Outline(torch.float32, (2,))}, lambda _: tensor)


def test_a_type_that_no_run_saves_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, dtype=torch.float8_e8m0fnu)}, tmp_path / "file")
    with pytest.raises(CheckpointError, match="w has dtype F8_E8M0"):
        outlines(file_layout(tmp_path / "file"))


def test_what_is_no_file_of_tensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match="file"), open_reader(file_layout(tmp_path / "file")):
        pass
