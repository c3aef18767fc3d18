"""What a step reads from the device: on a GPU each read waits until all work that is queued is done."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch.overrides import TorchFunctionMode

from instar.run.trainer import Trainer

Make = Callable[..., Trainer]
READS = {"item", "tolist", "cpu", "numpy", "nonzero", "equal"} | {
    f"__{kind}__" for kind in ("bool", "int", "float", "index", "complex", "contains")
}
STEPS = 6


class Reads(TorchFunctionMode):
    """Counts the functions of `instar` that read a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.__name__ in READS:
            frame = sys._getframe(1)
            if "/torch/optim/" in frame.f_code.co_filename:
                # counts of steps, which kernels that are not fused keep in host memory
                return func(*args, **(kwargs or {}))
            code = frame.f_code  # below: not a comprehension's
            while "/instar/" not in code.co_filename or code.co_name.startswith("<"):
                assert frame.f_back is not None
                frame = frame.f_back
                code = frame.f_code
            self.counts[f"{Path(code.co_filename).name}: {code.co_name}"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "keys",
    [
        ("optimizer.name=adamw", "train.ema=0.9"),
        ("optimizer.name=muon", "train.clip=0.01"),
        ("precision=bf16",),
        ("reproducible=elastic",),
    ],
    ids=" ".join,
)
def test_a_step_reads_the_norm_of_the_gradient_and_nothing_else(
    trainer: Make, keys: tuple[str, ...]
) -> None:
    run = trainer(f"train.until=[{STEPS}it]", "record.log_interval=100", *keys)
    reads = Reads()

    def watch_step() -> AbstractContextManager[Any]:
        # the first step is logged
        return reads if run.state.step else nullcontext()

    run.around_step = watch_step
    run.train()
    flags = reads.counts.pop("agree.py: wait")  # in host memory
    assert flags == STEPS - 1
    assert sum(reads.counts.values()) == STEPS - 1, reads.counts
