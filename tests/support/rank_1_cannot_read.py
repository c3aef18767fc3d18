"""Run with two ranks, the second of which cannot read its sixth step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from instar.cli.main import main
from instar.data.loader import Prefetcher, StepBatch
from instar.distributed.launch import launch_ranks
from instar.distributed.placement import LaunchOptions

take = Prefetcher.take


def take_until_the_disk_is_gone(
    self: Prefetcher, cursor: int, global_batch: int, batch_size: int, give_up: Callable[[], bool]
) -> StepBatch:
    if cursor == 5 * 8 and os.environ["RANK"] == "1":
        raise OSError("the disk is gone")
    return take(self, cursor, global_batch, batch_size, give_up)


if __name__ == "__main__":
    if "RANK" in os.environ:
        Prefetcher.take = take_until_the_disk_is_gone
        sys.exit(main(["train", *sys.argv[1:]]))
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    sys.exit(launch_ranks(LaunchOptions(sys.argv[1:], 2, module="rank_1_cannot_read")))
