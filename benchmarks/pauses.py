"""How long a run stands still for a checkpoint, against one step and against the bare disk.

    python benchmarks/pauses.py [--quick]

A trainer makes steps in this process; between them it saves, in the background and then waited
for, and as many bytes are written and synced without anything around them. The stall of a
background save is what its call takes and what the steps beside it take longer than others. The
arrangements take turns. Verifying reads every byte of a checkpoint that was just written.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from instar.checkpoint.listing import list_checkpoints
from instar.checkpoint.manifest import read_manifest, verify_files
from instar.config.load import load_config
from instar.distributed.rank_log import RankLog
from instar.distributed.signals import StopSignal
from instar.distributed.world import World
from instar.record.console import silent_console
from instar.record.recorder import Silent
from instar.record.rundir import RunDir
from instar.run.start.build import RunOutputs, build_trainer
from instar.run.start.preflight import preflight, prepare_run_data
from instar.run.trainer import Trainer
from report import Case, case, options, parser, publish
from throughput import gpt


@dataclass(frozen=True)
class Size:
    """A model, a batch, and how often each thing is done."""

    name: str
    overrides: tuple[str, ...]
    steps: int
    """between two saves"""
    repeats: int


SIZES = (
    Size("10 M", gpt(6, 6, 384, 256, 4), steps=4, repeats=5),
    Size("124 M", ("model.vocab_size=50304", *gpt(12, 12, 768, 256, 1)), steps=2, repeats=3),
)
QUICK = (Size("tiny", gpt(1, 1, 16, 16, 2), steps=2, repeats=1),)


def main() -> None:
    run_options = options(parser(__doc__).parse_args())
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for size in QUICK if run_options.quick else SIZES:
            cases += measure(size, Path(folder), run_options.quick)
    publish("pauses", cases, run_options)


def measure(size: Size, folder: Path, quick: bool) -> list[Case]:
    trainer = trainer_of(size, folder, quick)
    step_s: list[float] = []
    stall_s: list[float] = []
    sync_s: list[float] = []
    raw_s: list[float] = []
    verify_rate: list[float] = []
    with closing(trainer):
        seconds_of(trainer.step)
        for repeat in range(size.repeats):
            undisturbed_s = [seconds_of(trainer.step) for _ in range(size.steps)]
            step_s += undisturbed_s
            stall_s.append(background(trainer, statistics.median(undisturbed_s)))
            trainer.step()
            sync_s.append(seconds_of(lambda: trainer.save("waited for", wait=True)))
            path = list_checkpoints(trainer.parts.saver.root)[-1]
            files = {file: file.stat().st_size for file in path.rglob("*.safetensors")}
            raw_s.append(raw_write(folder, sum(files.values())))
            seconds = seconds_of(lambda path=path: verify_files(path, read_manifest(path)))
            verify_rate.append(sum(files.values()) / seconds / 1e9)
            print(f"{size.name}: {repeat + 1} of {size.repeats}", file=sys.stderr)
    median = statistics.median(step_s)
    return [
        case(f"{size.name}: size of a checkpoint", [sum(files.values()) / 1e6], "MB"),
        case(f"{size.name}: one step", step_s, "s"),
        case(f"{size.name}: stall of a background save", stall_s, "s"),
        case(
            f"{size.name}: stall of a background save / step",
            [stall / median for stall in stall_s],
            "ratio",
            most=0.5,
        ),
        case(f"{size.name}: save waited for", sync_s, "s"),
        case(f"{size.name}: raw synced write", raw_s, "s"),
        case(
            f"{size.name}: save waited for / raw synced write",
            [save_s / raw for save_s, raw in zip(sync_s, raw_s, strict=True)],
            "ratio",
            most=1.3,
        ),
        case(f"{size.name}: verify", verify_rate, "GB/s", least=1.0),
    ]


def trainer_of(size: Size, folder: Path, quick: bool) -> Trainer:
    """A trainer of the size, at step 0, whose run is under `folder`."""
    run_dir = folder / size.name.replace(" ", "")
    loaded_config = load_config(
        None,
        [
            *size.overrides,
            f"data.path={folder / 'tokens'}",
            f"data.max_bytes={100_000 if quick else 2_000_000}",
            f"record.run_dir={run_dir}",
            "record.log_interval=1000000",
            "device=cpu",
            "checkpoint.keep_last=1",
        ],
    )
    prepare_run_data(loaded_config, 1, lambda _: None)
    prepared_run = preflight(loaded_config, 1)
    run_dir.mkdir()
    world = World(0, 0, 1, torch.device("cpu"), "none")
    return build_trainer(
        prepared_run,
        world,
        RunOutputs(StopSignal(), Silent(), silent_console(), RankLog(0), RunDir(run_dir)),
    )


def background(trainer: Trainer, step_s: float) -> float:
    """Seconds that a background save costs: its call, and what it takes from the steps beside it."""
    lost_s = seconds_of(lambda: trainer.save("in the background"))
    while trainer.parts.saver.pending is not None and not trainer.parts.saver.pending.done():
        lost_s += seconds_of(trainer.step) - step_s
    trainer.parts.saver.finish()
    return max(0.0, lost_s)


def raw_write(folder: Path, size: int) -> float:
    """Seconds to write and sync so many bytes that are in memory already."""
    content = memoryview(os.urandom(1 << 20) * -(-size // (1 << 20)))[:size]
    path = folder / "raw"
    start = time.perf_counter()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
