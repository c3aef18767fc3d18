"""What runs cost on GPUs: steps against a bare loop, saves, growth, and sharded against whole models.

    python benchmarks/gpu.py [--quick] [--heats N]

A smoke run trains a tiny model on the CPU. The rest needs a CUDA device; with two or more, ranks
on all of them train with `ddp` and with `fsdp`. Ends by naming the file to send back.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from instar.record.events import Event, OperationEvent, Saved, Train, read_events
from instar.record.system import machine
from report import Case, case, options, parser, publish
from throughput import GPU, QUICK, SAME, Size, measure, text_for


@dataclass(frozen=True)
class Lengths:
    """How many steps a run has, and after how many it saves and grows."""

    steps: int
    saves: int
    grows: int


LONG, SHORT = Lengths(200, 40, 100), Lengths(12, 4, 6)
RANKS_OF_SMOKE_RUN = 2


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--heats", type=int, metavar="N", help="of the steps; default: 3")
    arguments = words.parse_args()
    run_options = options(arguments)
    if not run_options.quick and not torch.cuda.is_available():
        sys.exit("this needs a CUDA device; --quick tries the script on the CPU")
    size, lengths = (QUICK, SHORT) if run_options.quick else (GPU, LONG)
    size = replace(size, heats=arguments.heats or size.heats)
    ranks = RANKS_OF_SMOKE_RUN if run_options.quick else torch.cuda.device_count()
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        data = text_for(Path(folder), 200_000 if run_options.quick else 8_000_000)
        run = Runs(Path(folder), (*size.overrides, *SAME, *data, "record.log_interval=1"), lengths)
        cases += measure(size, (*size.overrides, *SAME, *data), ("instar", "bare", "plain"), None)
        cases += saving(size, run)
        cases += growing(size, run)
        if ranks > 1:
            cases += sharding(size, run, ranks)
    facts = {} if run_options.quick else {k: v for k, v in machine("cuda").items() if v is not None}
    publish("gpu", cases, run_options, **facts)
    if run_options.results is not None:
        print(f"send back: {run_options.results / 'gpu.json'}")


@dataclass(frozen=True)
class Runs:
    """Trainings by `instar train`, below one folder."""

    folder: Path
    overrides: tuple[str, ...]
    lengths: Lengths

    def events(self, name: str, *overrides: str, ranks: int = 1) -> list[Event]:
        """The events of a run of `lengths.steps` steps."""
        command = [sys.executable, "-m", "instar.cli.main", "train", "--nproc", str(ranks)]
        ends = (f"train.until={self.lengths.steps}it", f"record.run_dir={self.folder / name}")
        for text in (*self.overrides, *ends, "record.report=false", *overrides):
            command += ["--set", text]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            sys.exit(process.stdout + process.stderr)
        return list(read_events(self.folder / name / "events.jsonl"))


def saving(size: Size, run: Runs) -> list[Case]:
    """Checkpoints in the background: how long training stands still, and how fast they are written."""
    events = run.events("saves", f"checkpoint.every_steps={run.lengths.saves}")
    # the last save is waited for
    saves = [event for event in events if isinstance(event, Saved)][:-1]
    stalls = [event.stall_s or 0.0 for event in saves]
    rates = [(event.size_bytes or 0) / (event.seconds or 1.0) / 1e9 for event in saves]
    step_s = 1 / statistics.median(steps_per_second(events))
    return [
        case(f"{size.name}: stall of a background save", stalls, "s"),
        case(
            f"{size.name}: stall of a save / step", [s / step_s for s in stalls], "ratio", most=1.0
        ),
        case(f"{size.name}: written by a background save", rates, "GB/s"),
    ]


def growing(size: Size, run: Runs) -> list[Case]:
    """Pauses for growth, proof included, without the save that follows and without compiling."""
    schedule = [
        {"name": "insert_layers", "value": 1, "when": {"at_step": run.lengths.grows}},
        {"name": "widen_mlp", "value": "x2", "when": {"at_step": run.lengths.grows + 2}},
    ]
    events = run.events("grows", f"schedule={json.dumps(schedule)}", "compile=false")
    return [
        case(f"{size.name}: pause of {event.name}", [event.seconds], "s")
        for event in events
        if isinstance(event, OperationEvent) and event.seconds is not None
    ]


def sharding(size: Size, run: Runs, ranks: int) -> list[Case]:
    """All ranks together with whole models, and with shards."""
    speeds = {}
    for strategy in ("ddp", "fsdp"):
        events = run.events(strategy, f"parallel.strategy={strategy}", ranks=ranks)
        speeds[strategy] = steps_per_second(events)
    ratios = [speed / statistics.median(speeds["ddp"]) for speed in speeds["fsdp"]]
    return [
        *(case(f"{size.name}, {ranks} ranks: {n}", s, "steps/s") for n, s in speeds.items()),
        case(f"{size.name}, {ranks} ranks: fsdp / ddp", ratios, "ratio"),
    ]


def steps_per_second(events: Iterable[Event]) -> Sequence[float]:
    """Of the second half of a run."""
    train = [event for event in events if isinstance(event, Train)]
    tokens = train[-1].tokens / train[-1].step
    return [event.tokens_per_s / tokens for event in train[len(train) // 2 :] if event.tokens_per_s]


if __name__ == "__main__":
    main()
