"""Ranks whose traces say what they send; `forks.Child` runs these."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from instar.cli.main import main
from instar.distributed.agree import PendingFlags, ReducedFlags
from instar.run.output.profile import StepProfiler

WAIT = "waits for flags"


def with_shapes(argv: Sequence[str]) -> int:
    """The command line; traces have the shapes of what is sent, and when a rank waits for flags."""
    wait = PendingFlags.wait

    def waits(self: PendingFlags) -> ReducedFlags:
        with record_function(WAIT):
            return wait(self)

    def new_profile(_: StepProfiler) -> profile:
        return profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    PendingFlags.wait = waits  # type: ignore[method-assign]
    StepProfiler._new = new_profile  # type: ignore[method-assign]
    torch.set_num_threads(1)
    return main(argv)
