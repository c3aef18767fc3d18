"""What must not get worse: figures that are stable on a busy machine, in three minutes: `make bench-quick`.

    python benchmarks/guards.py [--quick]

Most are counted: modules that are imported, files that are opened, operators and collectives of a step. The others
are ratios of processor time, or of memory, to a plain equivalent, taken in turns in one process or by one pair of
processes after the other, so that what else the machine does meets both sides. Each has a bound; the exit code is 1 if
one is exceeded, and then the last figures in the history are printed beside it.

Counts depend on the versions of Python and of libraries: with others, `BOUNDS` has to be set anew. Metadata of packages
is not counted: pydantic and torch look for plugins in that of every package that is installed.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerActivity, profile

import history
import summary
from instar.data.order import Shuffled
from instar.models.architecture import Architecture
from instar.models.gpt import GPT
from instar.record.recorder import Recorder
from instar.run.trainer import Trainer
from loaders import LOADERS, Asked, as_generator, make_data
from logs import STEP
from pauses import Size, trainer_of
from report import HISTORY, RESULTS, Case, case, number, options, parser, publish
from startup import TEN_M, TINY, instar, memory, run_command, sets
from throughput import gpt

BOUNDS = {
    "instar --help, as typed: modules imported": 152,
    "instar --help, as typed: files opened, without metadata of packages": 98,
    "instar --help: modules of torch imported": 0,
    "instar --help / an empty script, processor time": 9,
    "instar train: modules imported": 1600,
    "instar train: files opened, without metadata of packages": 1540,
    "instar train: modules of torch's compiler imported": 0,
    "a step: operators, Instar / bare loop": 1.16,
    "a step: processor time, Instar / bare loop": 1.3,
    "a step of two ranks: operators on a rank": 2200,
    "a step of two ranks: all-reduces": 1,
    "a log call / a plain one, processor time": 2.2,
    "seek in 10⁹ samples / permutation of a batch, processor time": 9,
    "loading, shuffled / DataLoader by item, processor time": 1.2,
    "10 M parameters: peak memory, instar train / bare loop": 1.0,
}
"""Most that is allowed. Operators and collectives are exact; modules and files have 3 % for other minor versions of
libraries. Ratios of processor time have 12 % and more above the highest median of four runs at loads of 12 to 19 on two
cores; they were within 10 % of each other, of loading within 40 %. Memory has the bar of startup.py."""

SHUFFLED, BY_ITEM = "Instar, shuffled", "DataLoader, memmap by item"
STEP_MODEL = ("device=cpu", "precision=fp32", *gpt(2, 2, 64, 64, 4))
COMPILER = ("torch._dynamo", "torch._inductor", "sympy")
COUNTED = """
import sys
opened = set()
sys.addaudithook(lambda event, args: event == "open" and opened.add(str(args[0])))
from instar.cli.main import entry
try:
    entry()
except SystemExit:
    pass
import json
files = [path for path in opened if ".dist-info" not in path]
print(json.dumps({"opened": len(files), "modules": sorted(sys.modules)}))
"""


def main() -> None:
    run_options = options(parser(__doc__).parse_args())
    quick = run_options.quick
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = [f"data.path={folder / 'tokens'}", "data.max_bytes=200000"]
        cases = [
            *help_(1 if quick else 15),
            *training([*TINY, *data], folder),
            # a process that this one starts is at first as large as this one, which grows
            *(() if quick else peak([*TEN_M, *data], folder)),
            *steps(folder, turns=2 if quick else 60),
            *two_ranks([*TINY, *data], folder),
            *logging(folder, 20 if quick else 2000),
            *seeking(3 if quick else 200),
            *loading(folder, 2 if quick else 40),
        ]
    before = history.read((run_options.results or RESULTS) / HISTORY, "guards")
    publish("guards", cases, run_options)
    if run_options.results == RESULTS:
        summary.main()
    if not quick:
        sys.exit(worse(cases, before))


def guarded_case(name: str, figures: Sequence[float], unit: str = "ratio") -> Case:
    return case(name, figures, unit, most=BOUNDS[name])


def worse(cases: Sequence[Case], entries: Sequence[history.Entry]) -> str | None:
    """What to say of figures beyond their bounds; None: there are none."""
    lines = []
    for result in cases:
        if result.ok is False:
            lines.append(
                f"worse: {result.case}: {number(result.figure)}, the bound is {result.bar}"
            )
            lines += [
                f"  {entry.date[:10]}  {entry.commit}  {entry.cases[result.case]}"
                for entry in (history.comparable_entries(entries) if entries else [])
                if result.case in entry.cases
            ]
    return "\n".join(lines) or None


def help_(repeats: int) -> Iterator[Case]:
    """What the command does before it answers."""
    name = "instar --help"
    count_imports("--help")  # compiles the modules
    counts = count_imports("--help")
    yield from imports(f"{name}, as typed", counts)
    of_torch = number_of(counts["modules"], ["torch"])
    yield guarded_case(f"{name}: modules of torch imported", [of_torch], "modules")
    command_times, empty = [], []
    for _ in range(repeats):
        command_times.append(processor_s(lambda: run_command(instar("--help"))))
        empty.append(processor_s(lambda: run_command([sys.executable, "-c", ""])))
    yield guarded_case(f"{name} / an empty script, processor time", ratios(command_times, empty))


def training(overrides: Sequence[str], folder: Path) -> Iterator[Case]:
    """What a run imports and opens until its end, after its tokens were made."""
    name = "instar train"
    for turn in ("first", "counted"):
        counts = count_imports("train", *sets([*overrides, f"record.run_dir={folder / turn}"]))
    yield from imports(name, counts)
    compiler = number_of(counts["modules"], COMPILER)
    yield guarded_case(f"{name}: modules of torch's compiler imported", [compiler], "modules")


def imports(name: str, counts: dict[str, Any]) -> Iterator[Case]:
    yield guarded_case(f"{name}: modules imported", [len(counts["modules"])], "modules")
    yield guarded_case(
        f"{name}: files opened, without metadata of packages", [counts["opened"]], "files"
    )


def count_imports(*words: str) -> dict[str, Any]:
    """Modules in the process of a command at its end, and how many files it opened."""
    output = run_command([sys.executable, "-c", COUNTED, *words]).output
    counts: dict[str, Any] = json.loads(output.splitlines()[-1])
    return counts


def number_of(modules: Sequence[str], packages: Sequence[str]) -> int:
    """How many of the modules are these packages, or in them."""
    return sum(
        any(f"{name}.".startswith(f"{package}.") for package in packages) for name in modules
    )


def steps(folder: Path, turns: int) -> Iterator[Case]:
    """A step of the trainer against one of a bare loop, on the same model and batch, in turns."""
    (folder / "loop").mkdir()
    with closing(
        trainer_of(Size("loop", STEP_MODEL, 1, 1), folder / "loop", quick=True)
    ) as trainer:
        bare = bare_step(trainer)
        works = {"ours": trainer.step, "bare": bare}
        for work in works.values():
            for _ in range(5):
                work()
        operators = {name: operators_of(work) for name, work in works.items()}
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for turn in range(turns):
            for name in random.Random(turn).sample(list(works), 2):
                seconds[name].append(processor_s(lambda name=name: repeat(works[name], 10)))
    yield guarded_case(
        "a step: operators, Instar / bare loop", [operators["ours"] / operators["bare"]]
    )
    yield guarded_case(
        "a step: processor time, Instar / bare loop", ratios(seconds["ours"], seconds["bare"])
    )


def bare_step(trainer: Trainer) -> Callable[[], None]:
    """A step of a plain loop with the trainer's model, without its weights."""
    spec: Any = trainer.parts.task
    arch: Architecture = spec.architecture
    model = GPT(arch)
    model.init_weights(seed=1337)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = trainer.parts.config.train.batch_size
    tokens = torch.randint(arch.vocab_size, (batch, arch.context + 1))

    def step() -> None:
        loss = model(tokens[:, :-1], tokens[:, 1:]) / (batch * arch.context)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def operators_of(work: Callable[[], object]) -> int:
    """Operators of torch that it calls, also inside others."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    return len(profiler.events() or ())


def two_ranks(overrides: Sequence[str], folder: Path) -> Iterator[Case]:
    """Operators and collectives of a step under DDP, in the trace of rank 0."""
    run, step_count = folder / "ranks", 4
    length = ["train.until=[12it]", "train.gradient_accumulation_steps=2", f"record.run_dir={run}"]
    words = ["--nproc", "2", "--profile", f"{step_count}it", *sets([*overrides, *length])]
    run_command(instar("train", *words))
    with gzip.open(run / "profile" / "rank_0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "cpu_op"]
    title = "a step of two ranks"
    yield guarded_case(f"{title}: operators on a rank", [len(names) / step_count], "operators")
    meetings = names.count("c10d::allreduce_") / step_count
    yield guarded_case(f"{title}: all-reduces", [meetings], "all-reduces")


def logging(folder: Path, calls: int) -> Iterator[Case]:
    """The recorder's call against a dictionary encoded by json and written to a file."""
    plain = {"step": 1, "loss": 5.2, "lr": 1e-3, "tokens": 1000, "norm": 1.5, "time": 1.7e9}
    file = os.open(folder / "plain.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Recorder(folder / "written.jsonl") as recorder:
        time_ratios = in_turns(
            lambda: repeat(lambda: recorder.write(STEP), 20),
            lambda: repeat(lambda: os.write(file, json.dumps(plain).encode() + b"\n"), 20),
            max(2, calls // 20),
        )
    os.close(file)
    yield guarded_case("a log call / a plain one, processor time", time_ratios)


def seeking(repeats: int) -> Iterator[Case]:
    """A batch at 90 % of an epoch of 10⁹ samples against a permutation of as many numbers."""
    samples, batch = 10**9, 4096
    at, rng = samples * 9 // 10, np.random.default_rng(1)
    time_ratios = in_turns(
        lambda: Shuffled(samples, seed=1).indices(3, at, at + batch),
        lambda: rng.permutation(batch),
        repeats,
    )
    yield guarded_case("seek in 10⁹ samples / permutation of a batch, processor time", time_ratios)


def loading(folder: Path, turns: int) -> Iterator[Case]:
    """Batches of shuffled windows, against torch's loader of items from a memory-mapped file.

    Not against a copy: how much faster it is than Python differs from machine to machine.
    """
    batch, context, batches = 32, 1024, 8
    make_data(folder / "windows", 4_000_000, context)
    request = Asked(
        SHUFFLED, str(folder / "windows"), batch, context, turns=1, seconds=1, copy_bytes=0
    )
    with ExitStack() as stack:
        instar_pairs, item_pairs = (
            stack.enter_context(closing(as_generator(LOADERS[name](request))))
            for name in (SHUFFLED, BY_ITEM)
        )
        for pairs in (instar_pairs, item_pairs):
            repeat(lambda pairs=pairs: next(pairs), batches)
        time_ratios = in_turns(
            lambda: repeat(lambda: next(instar_pairs), batches),
            lambda: repeat(lambda: next(item_pairs), batches),
            turns,
        )
    yield guarded_case("loading, shuffled / DataLoader by item, processor time", time_ratios)


def peak(overrides: Sequence[str], folder: Path) -> Iterator[Case]:
    """Of whole processes, after two steps."""
    memory_cases = memory("10 M parameters", overrides, folder, repeats=1, steps=2)
    name = "10 M parameters: peak memory, instar train / bare loop"
    yield guarded_case(name, [entry.figure for entry in memory_cases if entry.case == name])


def in_turns(
    work: Callable[[], object], reference: Callable[[], object], turns: int
) -> list[float]:
    """Ratios of processor times; who comes first is drawn."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(turns):
        for is_work in random.Random(turn).sample([True, False], 2):
            seconds[is_work].append(processor_s(work if is_work else reference))
    return ratios(seconds[True], seconds[False])


def repeat(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [numerator / other for numerator, other in zip(numerators, denominators, strict=True)]


def processor_s(work: Callable[[], object]) -> float:
    """Processor time of this process, all its threads and the processes that it waited for."""
    start = _processor_s()
    work()
    return _processor_s() - start


def _processor_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
