"""What the loading benchmark compares, and that it tells a loader that cheats."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from instar.data.order import Shuffled
from instar.data.text.shards import open_dataset

TOKENS, CONTEXT, BATCH = 5_000, 16, 4


@pytest.fixture(scope="module")
def loaders(module: Any) -> ModuleType:
    loaders_module: ModuleType = module("loaders")
    return loaders_module


@pytest.fixture(scope="module")
def data(loaders: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("data")
    loaders.make_data(folder, TOKENS, CONTEXT)
    loaders.flat_file(folder)
    return folder


def request_of(loaders: ModuleType, data: Path, name: str) -> Any:
    return loaders.Asked(name, str(data), BATCH, CONTEXT, turns=1, seconds=0.01, copy_bytes=0)


@pytest.mark.parametrize(
    "name",
    [
        "one batch copied, in the cache",
        "Instar, shuffled",
        "Instar, shuffled in blocks",
        "Instar, sequential",
        "Instar, shuffled, read ahead",
        "DataLoader, memmap by item",
        "DataLoader, HF data set",
        "DataLoader, HF iterable",
    ],
)
def test_every_loader_gives_windows_of_the_same_data(
    loaders: ModuleType, data: Path, name: str
) -> None:
    work = request_of(loaders, data, name)
    loaders.check(work)
    assert loaders.loading(work) > 0


@pytest.mark.parametrize(
    "cheat",
    [
        lambda pair: (pair[0], pair[0]),
        lambda pair: (pair[0].int(), pair[1].int()),
        lambda pair: (pair[0][:, 1:], pair[1][:, 1:]),
        lambda pair: (pair[0][:2], pair[1][:2]),
        lambda pair: (pair[1], pair[1].roll(-1, dims=1)),
    ],
    ids=["no next token", "other dtype", "shorter", "fewer", "no sample of the data"],
)
def test_a_loader_that_does_less_is_refused(
    loaders: ModuleType, data: Path, monkeypatch: pytest.MonkeyPatch, cheat: Any
) -> None:
    honest = loaders.LOADERS["DataLoader, memmap by item"]
    dishonest = {"cheat": lambda work: map(cheat, honest(work))}
    monkeypatch.setattr(loaders, "LOADERS", dishonest)
    with pytest.raises(SystemExit, match="no batch of windows"):
        loaders.check(request_of(loaders, data, "cheat"))


def test_rows_and_windows_agree(loaders: ModuleType, data: Path) -> None:
    work = request_of(loaders, data, "")
    rows = loaders.hf_rows(work)
    windows = loaders.Windows(work)
    assert len(rows) == len(windows) == (TOKENS - 1) // CONTEXT
    for index in (0, 100, len(rows) - 1):
        inputs, targets = windows[index]
        assert torch.equal(rows[index]["tokens"], torch.cat([inputs, targets[-1:]]))


def test_the_place_sought_is_that_of_the_order(module: Any, tmp_path: Path) -> None:
    module("sparse").make_sparse(tmp_path / "holes", 1000 * CONTEXT + 1)
    step = module("seeking").instar_seek(tmp_path / "holes", "shuffled", BATCH, CONTEXT)()
    assert (step.plan.epoch, step.plan.start, step.plan.count) == (1, 900, BATCH)
    assert Shuffled(1000, 1).samples_per_epoch == step.epoch_samples


def test_a_sparse_data_set_takes_no_room(module: Any, tmp_path: Path) -> None:
    sparse = module("sparse")
    sparse.make_sparse(tmp_path / "holes", 10**9)
    (file,) = (tmp_path / "holes").glob("*.safetensors")
    assert file.stat().st_size > 2 * 10**9
    assert file.stat().st_blocks * 512 < 1 << 20
    split = open_dataset(tmp_path / "holes").split("train")
    assert not np.any(split.read(10**9 - 5, 10**9))


def test_memory_is_told_by_kind(module: Any) -> None:
    sparse = module("sparse")
    before = sparse.resident()
    # not by malloc, which may have freed pages at hand
    mapping = mmap.mmap(-1, 50_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    while mapping.tell() < 50_000_000:
        mapping.write(b"1" * 100_000)
    growth = {kind: mb - before[kind] for kind, mb in sparse.resident().items()}
    assert growth["anonymous"] == pytest.approx(50, rel=0.1)
    assert growth["file"] < 5
