"""What a torch `DataLoader` says, and the run does otherwise, is told; what agrees is not."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from instar.config.load import load_config
from instar.config.schema import RunConfig
from instar.data.torch_loader import check_loader, unused_settings

SAMPLES = list(range(12))


def config(*overrides: str) -> RunConfig:
    return load_config(None, ["train.batch_size=4", *overrides]).config


@pytest.mark.parametrize(
    ("loader", "overrides", "notes"),
    [
        ({"shuffle": True}, (), []),
        ({"sampler": WeightedRandomSampler([1.0] * 12, 12)}, (), []),
        ({"batch_size": None, "shuffle": True}, (), []),
        ({}, ("data.order=sequential",), []),
        ({}, (), ["data.order shuffled is used, not the shuffle=False of the DataLoader"]),
        (
            {"shuffle": True},
            ("data.order=sequential",),
            ["data.order sequential is used, not the shuffle=True of the DataLoader"],
        ),
        (
            {"shuffle": True, "batch_size": 5},
            (),
            ["train.batch_size 4 is used, not the batch_size 5 of the DataLoader"],
        ),
        (
            {"shuffle": True, "drop_last": True, "num_workers": 2},
            (),
            [
                "data.drop_last false is used, not the drop_last True of the DataLoader",
                "data.workers 0 is used, not the num_workers 2 of the DataLoader",
            ],
        ),
        (
            {"shuffle": True, "drop_last": True, "num_workers": 2},
            ("data.drop_last=true", "data.workers=2"),
            [],
        ),
        (
            {"shuffle": True, "generator": torch.Generator()},
            (),
            ["the run's seed is used, not the generator of the DataLoader"],
        ),
    ],
)
def test_settings_that_are_not_used_are_said(
    loader: dict[str, Any], overrides: tuple[str, ...], notes: list[str]
) -> None:
    train = DataLoader(SAMPLES, **{"batch_size": 4, **loader})  # type: ignore[arg-type, var-annotated]
    assert unused_settings(train, config(*overrides)) == notes
    assert (
        unused_settings({"train": train, "val": DataLoader(SAMPLES)}, config(*overrides)) == notes
    )  # type: ignore[arg-type]
    assert unused_settings(SAMPLES, config(*overrides)) == []


def test_a_sampler_of_a_part_of_the_samples_is_refused() -> None:
    for size in (3, 12):
        sampler = RandomSampler(SAMPLES, num_samples=size)  # type: ignore[arg-type]
        loader = DataLoader(SAMPLES, sampler=sampler)  # type: ignore[arg-type, var-annotated]
        with nullcontext() if size == 12 else pytest.raises(ValueError, match="draws 3 of 12 samp"):
            check_loader(loader)
