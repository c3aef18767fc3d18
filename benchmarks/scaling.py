"""How much of W processes' speed W ranks keep: `instar train --nproc W`, one thread per rank.

    python benchmarks/scaling.py [--quick] [--ranks W] [--repeats N] [--way NAME …] [--set KEY=VALUE …]

Efficiency is T(W) / (W · T(1)), T in tokens per second of training steps, with the same batch per
rank. T(1) is measured with W − 1 independent copies beside it, so that sharing the machine's caches
and memory bus costs both sides alike and only communication is left. T(1) is that of token shards, so that what another way of loading costs shows as well.
All arrangements take turns, in random order. Speeds come from the runs' own records, without the
first steps.

The ways differ in how samples reach ranks: token shards, and the same text as an Arrow data set, read
at any place (rows) or from its beginning (stream); sharded, each rank reading its own, or dispatched,
rank 0 reading for all. In fsdp, ranks also hold the model in parts. Without --way, sharded and dispatched tokens,
rows and a stream are measured, in less than five minutes on two idle cores.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import numpy as np

from instar.config.load import load_config
from instar.data.text.corpus import STDLIB, open_corpus
from instar.data.text.prepare import prepare_dataset
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


@dataclass(frozen=True)
class Way:
    """A way in which samples reach the ranks, or in which these hold the model."""

    name: str
    overrides: tuple[str, ...]
    least: float | None = None
    """of W times T(1)"""
    least_of_first: float | None = None
    """of what the first strategy reaches"""

    data: str = "tokens"
    """the folder: of token shards, or of what is kept beside the Arrow data"""


SHARDED = Way("sharded", (), least=0.97)
ROWS, STREAM = "data.kind=rows", "data.kind=stream"
DISPATCHED = "data.strategy=dispatched"
WAYS = (
    SHARDED,
    Way("dispatched", (DISPATCHED,), least=0.95, least_of_first=0.97),
    Way("sharded rows", (ROWS,), least_of_first=0.95, data="rows"),
    Way("sharded rows in blocks", (ROWS, "data.order=blocks"), least_of_first=0.95, data="rows"),
    Way("sharded stream", (STREAM,), least_of_first=0.95, data="stream"),
    Way("fsdp", ("parallel.strategy=fsdp",), least_of_first=0.85),
    Way("dispatched stream", (STREAM, DISPATCHED), least_of_first=0.95, data="stream"),
)

BY_DEFAULT = ("dispatched", "sharded rows", "sharded stream")

ONE_M = (
    *("precision=fp32", "record.log_interval=5"),
    *("model.n_layer=5", "model.n_head=4", "model.n_embd=128"),
)
SIZES = (Size("1 M, 32×128 tokens", ONE_M, batch=32, context=128, warmup=5, steps=15, repeats=3),)
QUICK = Size(
    "tiny, 4×32 tokens",
    ("model.n_layer=1", "model.n_head=2", "model.n_embd=32", "record.log_interval=2"),
    batch=4,
    context=32,
    warmup=2,
    steps=4,
    repeats=1,
)


@dataclass(frozen=True)
class Pace:
    """How fast runs went after their warm-up."""

    rate: float
    """tokens per active second; of several runs the mean"""
    wait: float
    """share of the steps' time in which ranks waited for samples"""


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--ranks", type=int, default=2, metavar="W", help="default: 2")
    words.add_argument("--repeats", type=int, metavar="N", help="of every arrangement; default: 3")
    words.add_argument(
        "--way",
        action="append",
        choices=[way.name for way in WAYS],
        help=f"beside {SHARDED.name}; default: {', '.join(BY_DEFAULT)}; --quick: none",
    )
    words.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of every run's config"
    )
    arguments = words.parse_args()
    run_options = options(arguments)
    other_ways = arguments.way or (() if run_options.quick else BY_DEFAULT)
    ways = [s for s in WAYS if s is SHARDED or s.name in other_ways]
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        for preset_size in (QUICK,) if run_options.quick else SIZES:
            size = replace(preset_size, repeats=arguments.repeats or preset_size.repeats)
            cases += measure(size, arguments.ranks, ways, arguments.set, Path(folder))
    publish("scaling", cases, run_options, threads_per_rank=1)


def measure(
    size: Size, ranks: int, ways: Sequence[Way], extra: Sequence[str], folder: Path
) -> list[Case]:
    base = {way: overrides(size, way, extra, folder) for way in ways}
    arrangements = {"beside": (SHARDED, ranks, 1)}
    arrangements |= {way.name: (way, 1, ranks) for way in ways}
    paces: dict[str, list[Pace]] = {name: [] for name in arrangements}
    for repeat in range(size.repeats):
        for name in random.Random(repeat).sample(list(arrangements), len(arrangements)):
            way, copies, world = arrangements[name]
            paces[name].append(pace(size, base[way], folder, copies=copies, ranks=world))
        efficiency = paces[SHARDED.name][-1].rate / (ranks * paces["beside"][-1].rate)
        message = f"{size.name}: {repeat + 1} of {size.repeats}, efficiency {efficiency:.3f}"
        print(message, file=sys.stderr)
    rates = {name: [pace.rate for pace in of_name] for name, of_name in paces.items()}
    title = f"{size.name} per rank"
    cases = [
        case(f"{title}: T(1), beside {ranks - 1} independent", rates["beside"], "tokens/s"),
        case(f"{title}: T({ranks})", rates[SHARDED.name], "tokens/s"),
        case(
            f"{title}: T({ranks}) / {ranks} T(1), beside",
            ratios(rates[SHARDED.name], rates["beside"], ranks),
            "ratio",
            least=SHARDED.least,
        ),
    ]
    for way in ways:
        rank_rates = rates[way.name]
        name = f"{title}, {way.name}"
        waits = [pace.wait for pace in paces[way.name]]
        cases += [
            case(f"{name}: T({ranks})", [rate / size.context for rate in rank_rates], "samples/s"),
            case(f"{name}: waiting for samples, of a step", waits, "ratio", most=0.01),
        ]
        if way is SHARDED:
            continue
        cases += [
            case(
                f"{name}: T({ranks}) / {ranks} T(1), beside",
                ratios(rank_rates, rates["beside"], ranks),
                "ratio",
                least=way.least,
            ),
            case(
                f"{name}: T({ranks}) / that of {SHARDED.name}",
                ratios(rank_rates, rates[SHARDED.name]),
                "ratio",
                least=way.least_of_first,
            ),
        ]
    return cases


def ratios(rates: Sequence[float], references: Sequence[float], times: int = 1) -> list[float]:
    """Repeat by repeat."""
    return [rate / (times * other) for rate, other in zip(rates, references, strict=True)]


def overrides(size: Size, way: Way, extra: Sequence[str], folder: Path) -> list[str]:
    """The config of every run of a size; its data set is made."""
    max_bytes = 200_000 if size.name == QUICK.name else 16_000_000
    base = [
        *size.model,
        f"model.context={size.context}",
        f"data.path={folder / way.data}",
        "device=cpu",
        f"train.batch_size={size.batch}",
        f"train.until=[{size.warmup + size.steps}it]",
        "eval.eval_interval=1000000",
        "eval.eval_iters=1",
        *way.overrides,
        *extra,
    ]
    if way.data == "tokens":
        base += [f"data.max_bytes={max_bytes}"]
        loaded_config = load_config(None, base)
        prepare_dataset(loaded_config.config.data, loaded_config.config.seed, say=lambda _: None)
    else:
        source, held_out = arrow_text(folder, max_bytes)
        base += [f"data.source={source}", f"data.val_source={held_out}"]
        # one short run prepares them
        short = ("train.until=[4it]", "record.log_interval=1")
        pace(replace(size, warmup=1), [*base, *short], folder)
    return base


def arrow_text(folder: Path, max_bytes: int) -> tuple[Path, Path]:
    """The standard library's source as an Arrow data set of 8 files, and a text that it lacks."""
    rows, held_out = folder / "text", folder / "held-out.txt"
    if not rows.exists():
        corpus = open_corpus(STDLIB, "text")
        number = int(np.searchsorted(np.cumsum(corpus.sizes), max_bytes)) + 1
        sizes = corpus.sizes[:number]
        parts = np.stack([np.arange(sizes.size), np.zeros_like(sizes), sizes], axis=1)
        texts = ["".join(pieces) for pieces in corpus.texts(parts)]
        held_out.write_text("\n".join(texts[::20]), encoding="utf-8")
        del texts[::20]
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(rows, num_shards=8)
    return rows, held_out


def pace(size: Size, base: Sequence[str], folder: Path, *, copies: int = 1, ranks: int = 1) -> Pace:
    """Of a run of `ranks` ranks; of `copies` side by side the mean.

    Raises:
        SystemExit: a run failed, or took longer than anybody would wait.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place, ExitStack() as stack:
        runs = [Path(place) / str(copy) for copy in range(copies)]
        processes = [stack.enter_context(start(base, run, ranks)) for run in runs]
        deadline = time.monotonic() + LIMIT_S
        for process in processes:
            _, output = process.communicate(timeout=deadline - time.monotonic())
            if process.returncode:
                sys.exit(f"instar train failed:\n{output}")
        return mean_pace([training_events(run) for run in runs], size.warmup)


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


def training_events(run: Path) -> Mapping[int, Train]:
    """What a run recorded of its training, by step."""
    events = read_events(run / "events.jsonl")
    return {event.step: event for event in events if isinstance(event, Train)}


def mean_pace(runs: Sequence[Mapping[int, Train]], warmup: int) -> Pace:
    """Over the time in which all runs were training.

    Copies that did not train at the same time are counted whole, with a warning: T(1) is then
    rather too high than too low.
    """
    begin = max(run[warmup].time for run in runs)
    end = min(run[max(run)].time for run in runs)
    rates, waits = list[float](), list[float]()
    for run in runs:
        window = [event for event in run.values() if begin <= event.time <= end]
        if len(window) < 2:
            print("copies did not train at the same time; T(1) is too high", file=sys.stderr)
            window = [event for event in run.values() if event.step >= warmup]
        first, last = window[0], window[-1]
        rates.append((last.tokens - first.tokens) / (last.active_s - first.active_s))
        waits += [event.data_wait for event in window[1:]]
    return Pace(statistics.mean(rates), statistics.mean(waits))


if __name__ == "__main__":
    main()
