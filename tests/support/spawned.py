"""A user's script whose two ranks are processes of torch.multiprocessing: forked, without the seconds
in which new interpreters import torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from instar.api import train


def work(rank: int, world_size: int, port: int, overrides: list[str]) -> None:
    train("tiny.yaml", overrides, rank=rank, world_size=world_size, port=port)


def fork_ranks(port: int, overrides: list[str]) -> None:
    try:
        mp.start_processes(work, args=(2, port, overrides), nprocs=2, start_method="fork")
    finally:
        # which the interpreter does at its end
        for process in mp.active_children():
            process.join()


def spoil(sample: dict[str, Any], generator: object) -> dict[str, Any]:
    """For `data.transform`: rank 1 cannot read, but for the samples that are tried before the run has a folder."""
    del generator
    if os.environ["RANK"] == "1" and Path("failed").exists():
        raise ValueError("boom")
    return sample
