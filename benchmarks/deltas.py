"""What it costs a training to save the weights of every step as a delta.

    python benchmarks/deltas.py [--quick]

Two trainers of the same config make steps in turn in this process: one saves deltas, in bf16 and
with an anchor every 50 links, the other does not. Their weights and samples are the same.
The cost is the difference of the two times. First training has one thread, and the writer a core
that is idle, as beside a GPU; then training has all cores, and the writer takes time from it.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from instar.config.budget import Counters
from instar.extensions.delta.events import Delta
from instar.run.checkpointing import save_checkpoint_if_due
from instar.run.trainer import Trainer
from pauses import Size, seconds_of, trainer_of
from report import Case, case, options, parser, publish
from throughput import gpt

ALL = torch.get_num_threads()
DELTAS = ("checkpoint.delta.every=1", "checkpoint.delta.dtype=bf16")
COMMON = ("precision=fp32", "checkpoint.every_minutes=100000", "eval.eval_interval=1000000")
RL = "optimizer.lr=1e-6"
"""about the rate of reinforcement learning"""


@dataclass(frozen=True)
class Costs:
    """What a size was measured to cost, one figure for each pair of turns."""

    step_s: list[float]
    """without deltas"""
    slowdown: list[float]
    """share of the time without deltas"""
    stall_share: list[float]
    """share of the time in which training waits for the copy, or for room"""
    link_s: list[float]
    density: list[float]
    size_bytes: list[float]


SIZES = (
    Size("1 M", (*COMMON, *gpt(5, 4, 128, 128, 16)), steps=1, repeats=24),
    Size("10 M", (*COMMON, *gpt(6, 6, 384, 256, 4)), steps=1, repeats=12),
    Size("10 M, rate 1e-6", (*COMMON, RL, *gpt(6, 6, 384, 256, 4)), steps=1, repeats=12),
)
QUICK = (Size("tiny", (*COMMON, *gpt(1, 1, 16, 16, 2)), steps=1, repeats=2),)


def main() -> None:
    run_options = options(parser(__doc__).parse_args())
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for size in QUICK if run_options.quick else SIZES:
            for threads in dict.fromkeys((1, ALL)):
                torch.set_num_threads(threads)
                place = Path(folder) / f"{size.name}-{threads}"
                place.mkdir()
                cases += figures(size, measure(size, place, run_options.quick), threads)
    publish("deltas", cases, run_options, libraries=("zstandard",), threads=ALL)


def figures(size: Size, costs: Costs, threads: int) -> list[Case]:
    spare = threads < ALL
    name = f"{size.name}, {'a core to spare' if spare else 'all cores train'}"
    return [
        case(f"{name}: one step", costs.step_s, "s"),
        case(f"{name}: one delta, in the background", costs.link_s, "s"),
        case(f"{name}: share of weights changed", [100 * value for value in costs.density], "%"),
        case(f"{name}: size of a delta", [value / 1e6 for value in costs.size_bytes], "MB"),
        case(f"{name}: training stands still", [100 * s for s in costs.stall_share], "%", most=2.0),
        case(
            f"{name}: training takes longer",
            [100 * share for share in costs.slowdown],
            "%",
            most=2.0 if spare else None,
        ),
    ]


def measure(size: Size, folder: Path, quick: bool) -> Costs:
    deltas: list[Delta] = []

    def log_event(_: Counters, event: Delta) -> None:
        deltas.append(event)

    without = trainer_of(replace(size, name="without"), folder, quick)
    with_deltas = trainer_of(
        replace(size, name="with", overrides=(*size.overrides, *DELTAS)), folder, quick
    )
    costs = Costs([], [], [], [], [], [])
    with closing(without), closing(with_deltas):
        (saver,) = with_deltas.parts.extensions
        saver.logger.log_event = log_event
        for run in (without, with_deltas, with_deltas):
            turn(run)
        for repeat in range(size.repeats):
            deltas.clear()
            seconds = {}
            # whoever comes second in one pair comes first in the next
            for run in (without, with_deltas)[:: 1 if repeat % 2 else -1]:
                seconds[run is with_deltas] = turn(run)
            (delta,) = deltas
            costs.step_s.append(seconds[False])
            costs.slowdown.append(seconds[True] / seconds[False] - 1.0)
            costs.stall_share.append(delta.stall_s / seconds[False])
            costs.link_s.append(delta.seconds)
            costs.size_bytes.append(delta.size_bytes)
            if delta.density is not None:
                costs.density.append(delta.density)
        print(f"{size.name}: {size.repeats} pairs", file=sys.stderr)
    return costs


def turn(run: Trainer) -> float:
    """Seconds of a step, beside which the weights before it are saved."""

    def train() -> None:
        run.state = save_checkpoint_if_due(run.state, run.parts)
        run.step()

    seconds = seconds_of(train)
    for saver in run.parts.extensions:
        saver.writer.flush()
        saver.log_written()
    return seconds


if __name__ == "__main__":
    main()
