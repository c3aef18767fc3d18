"""Whether `precision: auto` is the faster of bf16 and fp32, for each preset, on this processor and as older ones.

    python benchmarks/precision.py [--quick]

Each processor is a process, in which oneDNN and torch are told to use no newer instructions. For each preset and shape
it asks what `auto` chooses there, and trainers in both precisions take turns of one step each, on one thread. Figures are
medians of ratios of processor time. The bar is on what `auto` chose: not slower than fp32.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

from instar.config.load import load_config
from instar.distributed.world import World
from instar.run.start.preflight import preflight
from instar.run.start.rank_consistency import resolve_precision
from pauses import Size, trainer_of
from report import Case, case, options, parser, publish
from throughput import gpt

PROCESSORS: Mapping[str, Mapping[str, str]] = {
    "as it is": {},
    "without AMX": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "without bf16 units": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}
"""What is hidden, by environment."""
PRESETS = ("plain", "fast", "gpt2", "llama", "moult", "family")
SHAPES = {
    "4×128, 12×64 tokens": gpt(4, 4, 128, 64, 12),
    "4×384, 4×256 tokens": gpt(4, 6, 384, 256, 4),
}
TINY = {"4×16, 2×16 tokens": gpt(4, 1, 16, 16, 2)}
ENOUGH = 1.02
"""with the noise of a busy machine"""


@dataclass(frozen=True)
class Found:
    """One preset and shape on one processor."""

    preset: str
    shape: str
    precision: str
    bf16_of_fp32: list[float]
    """processor time of a step in bf16 over that of the step in fp32 beside it"""


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--child", action="store_true", help="measure in this process, print JSON")
    arguments = words.parse_args()
    if arguments.child:
        print(json.dumps([vars(result) for result in measure(arguments.quick)]))
        return
    run_options = options(arguments)
    cases: list[Case] = []
    for name, hidden in PROCESSORS.items():
        results = as_processor(hidden, run_options.quick)
        print(f"{name}: {len(results)} presets and shapes", file=sys.stderr)
        ratios = [1.0]
        for result in results:
            title = f"{name}, {result.preset}, {result.shape} (auto: {result.precision})"
            cases.append(case(f"{title}: time in bf16 / fp32", result.bf16_of_fp32, "ratio"))
            if result.precision == "bf16":
                ratios.append(statistics.median(result.bf16_of_fp32))
        # where auto is fp32, they are the same
        worst = case(f"{name}: time with auto / fp32, at most", [max(ratios)], "ratio", most=ENOUGH)
        cases.append(worst)
    publish("precision", cases, run_options, threads=1)


def as_processor(hidden: Mapping[str, str], quick: bool) -> list[Found]:
    """What a process finds that sees no newer instructions."""
    command = [sys.executable, __file__, "--child", *(["--quick"] if quick else [])]
    environ = os.environ | {"OMP_NUM_THREADS": "1"} | hidden
    process = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        sys.exit(f"failed with {dict(hidden)}")
    return [Found(**values) for values in json.loads(process.stdout.splitlines()[-1])]


def measure(quick: bool) -> list[Found]:
    torch.set_num_threads(1)
    presets, shapes = (PRESETS[:2], TINY) if quick else (PRESETS, SHAPES)
    with tempfile.TemporaryDirectory() as folder:
        return [
            measure_one(preset, shape, overrides, Path(folder) / f"{preset}-{number}", quick)
            for preset in presets
            for number, (shape, overrides) in enumerate(shapes.items())
        ]


def measure_one(
    preset: str, shape: str, overrides: Sequence[str], folder: Path, quick: bool
) -> Found:
    folder.mkdir()
    run_overrides = (f"preset={preset}", *overrides, "train.until=[100it]", "data.tokenizer=char")
    ratios = []
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(
                closing(
                    trainer_of(
                        Size(
                            precision,
                            (*run_overrides, f"precision={precision}"),
                            steps=1,
                            repeats=1,
                        ),
                        folder,
                        quick,
                    )
                )
            )
            for precision in ("fp32", "bf16")
        ]
        for number in range(2 if quick else 8):
            seconds = []
            for trainer in trainers:
                start = time.process_time()
                trainer.step()
                seconds.append(time.process_time() - start)
            if number:  # the first steps allocate
                ratios.append(seconds[1] / seconds[0])
            if not quick and seconds[1] > 3 * seconds[0] and number > 1:
                break  # nobody doubts it
    return Found(preset, shape, resolve_auto(run_overrides, folder, quick), ratios)


def resolve_auto(overrides: Sequence[str], folder: Path, quick: bool) -> str:
    """What `auto` chooses in this process."""
    # those of `trainer_of`
    data = [f"data.path={folder / 'tokens'}", f"data.max_bytes={100_000 if quick else 2_000_000}"]
    loaded_config = load_config(None, [*overrides, *data, "precision=auto", "device=cpu"])
    world = World(0, 0, 1, torch.device("cpu"), "none")
    return resolve_precision(preflight(loaded_config, 1), world)[0].config.precision


if __name__ == "__main__":
    main()
