"""What went over a process's groups, by torch's own record of every collective."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence

import torch

from instar.cli.main import main


def record_all() -> None:
    """Let the record, of 2,000 collectives otherwise, hold all; before the first group is made."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100000"


def of_tensor_subclasses() -> list[str]:
    """Return where collectives come from that DTensor makes by itself, which is what decision 62 forbids."""
    dump = torch._C._distributed_c10d._dump_fr_trace(
        includeCollectives=True, includeStackTraces=True, onlyActive=False
    )
    entries = pickle.loads(dump)["entries"]  # noqa: S301 - of this process
    assert entries, "torch has recorded nothing"
    stacks = ([f"{frame['filename']}:{frame['name']}" for frame in e["frames"]] for e in entries)
    return [
        "\n".join(stack)
        for stack in stacks
        if any("_functional_collectives.py" in frame for frame in stack)
    ]


def train(words: Sequence[str]) -> int:
    """Be `instar WORDS`, and fail if DTensor made a collective."""
    record_all()
    code = main(words)
    stacks = of_tensor_subclasses()
    assert stacks == [], f"{len(stacks)}, such as\n{stacks[0]}"
    return code
