"""How much of W processes' speed W ranks keep: `instar train --nproc W`, one thread per rank.

    python benchmarks/scaling.py [--quick] [--ranks W] [--set KEY=VALUE …]

Efficiency is T(W) / (W · T(1)), T in tokens per second of training steps, with the same batch per
rank. T(1) is measured with W − 1 independent copies beside it, so that sharing the machine's caches
and memory bus costs both sides alike and only communication is left; the ratio to a lone process is
shown too. The three arrangements take turns. Speeds come from the runs' own records, without the
first steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from instar.config.load import load
from instar.data.prepare import prepare
from instar.record.events import Train, read_events
from report import Case, case, options, parser, publish

LIMIT_S = 900.0


@dataclass(frozen=True)
class Size:
    """A model, what one rank runs at a step, and how long a run is."""

    name: str
    model: tuple[str, ...]
    batch: int
    """samples per rank and step"""
    context: int
    warmup: int
    steps: int
    """after the warm-up; both are multiples of the log interval"""
    repeats: int


ONE_M = ("model.n_layer=5", "model.n_head=4", "model.n_embd=128")
SIZES = (Size("1 M, 32×128 tokens", ONE_M, batch=32, context=128, warmup=10, steps=30, repeats=7),)
QUICK = Size(
    "tiny, 4×32 tokens",
    ("model.n_layer=1", "model.n_head=2", "model.n_embd=32", "record.log_interval=2"),
    batch=4,
    context=32,
    warmup=2,
    steps=4,
    repeats=1,
)


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--ranks", type=int, default=2, metavar="W", help="default: 2")
    words.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of every run's config"
    )
    parsed = words.parse_args()
    chosen = options(parsed)
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        for size in (QUICK,) if chosen.quick else SIZES:
            cases += measure(size, parsed.ranks, parsed.set, Path(folder))
    publish("scaling", cases, chosen, threads_per_rank=1)


def measure(size: Size, ranks: int, extra: Sequence[str], folder: Path) -> list[Case]:
    base = overrides(size, extra, folder)
    arrangements = {"alone": (1, 1), "beside": (ranks, 1), "together": (1, ranks)}
    rates: dict[str, list[float]] = {name: [] for name in arrangements}
    for repeat in range(size.repeats):
        turns = list(arrangements.items())
        for name, (copies, world) in turns[repeat % 3 :] + turns[: repeat % 3]:
            rates[name].append(rate(size, base, folder, copies=copies, ranks=world))
        efficiency = rates["together"][-1] / (ranks * rates["beside"][-1])
        said = f"{size.name}: {repeat + 1} of {size.repeats}, efficiency {efficiency:.3f}"
        print(said, file=sys.stderr)
    alone, beside, together = rates.values()
    title = f"{size.name} per rank"
    return [
        case(f"{title}: T(1), alone", alone, "tokens/s"),
        case(f"{title}: T(1), beside {ranks - 1} independent", beside, "tokens/s"),
        case(f"{title}: T({ranks})", together, "tokens/s"),
        case(
            f"{title}: T({ranks}) / {ranks} T(1), beside",
            [w / (ranks * one) for w, one in zip(together, beside, strict=True)],
            "ratio",
            least=0.95,
        ),
        case(
            f"{title}: T({ranks}) / {ranks} T(1), alone",
            [w / (ranks * one) for w, one in zip(together, alone, strict=True)],
            "ratio",
        ),
    ]


def overrides(size: Size, extra: Sequence[str], folder: Path) -> list[str]:
    """The config of every run of a size; its data set is made."""
    base = [
        *size.model,
        f"model.context={size.context}",
        f"data.path={folder / 'tokens'}",
        f"data.max_bytes={200_000 if size is QUICK else 16_000_000}",
        "device=cpu",
        f"train.batch_size={size.batch}",
        f"train.until=[{size.warmup + size.steps}it]",
        "eval.eval_interval=1000000",
        "eval.eval_iters=1",
        *extra,
    ]
    loaded = load(None, base)
    prepare(loaded.config.data, loaded.config.seed, say=lambda _: None)
    return base


def rate(
    size: Size, base: Sequence[str], folder: Path, *, copies: int = 1, ranks: int = 1
) -> float:
    """Tokens per second of a run of `ranks` ranks; of `copies` side by side the mean.

    Raises:
        SystemExit: a run failed, or took longer than anybody would wait.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place, ExitStack() as stack:
        runs = [Path(place) / str(copy) for copy in range(copies)]
        processes = [stack.enter_context(start(base, run, ranks)) for run in runs]
        deadline = time.monotonic() + LIMIT_S
        for process in processes:
            _, said = process.communicate(timeout=deadline - time.monotonic())
            if process.returncode:
                sys.exit(f"instar train failed:\n{said}")
        return mean_rate([trained(run) for run in runs], size.warmup)


def start(base: Sequence[str], run: Path, ranks: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "instar.cli.main", "train", "--nproc", str(ranks)]
    sets = [*base, f"record.run_dir={run}", f"train.gradient_accumulation_steps={ranks}"]
    return subprocess.Popen(
        [*command, *(word for text in sets for word in ("--set", text))],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def trained(run: Path) -> Mapping[int, Train]:
    """What a run recorded of its training, by step."""
    events = read_events(run / "events.jsonl")
    return {event.step: event for event in events if isinstance(event, Train)}


def mean_rate(runs: Sequence[Mapping[int, Train]], warmup: int) -> float:
    """Mean of the runs' tokens per active second, over the time in which all were training.

    Copies that did not train at the same time are counted whole, with a warning: T(1) is then
    rather too high than too low.
    """
    begin = max(run[warmup].time for run in runs)
    end = min(run[max(run)].time for run in runs)
    rates = []
    for run in runs:
        seen = [event for event in run.values() if begin <= event.time <= end]
        if len(seen) < 2:
            print("copies did not train at the same time; T(1) is too high", file=sys.stderr)
            seen = [event for event in run.values() if event.step >= warmup]
        first, last = seen[0], seen[-1]
        rates.append((last.tokens - first.tokens) / (last.active_s - first.active_s))
    return sum(rates) / len(rates)


if __name__ == "__main__":
    main()
