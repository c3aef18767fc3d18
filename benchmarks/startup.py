"""How long a command takes to answer, a run to its first step, and how much memory a run takes.

    python benchmarks/startup.py [--quick]

A tiny run's first step is timed from the start of its process, and so is that of `bare.py`, which
imports torch, reads the same tokens and makes the same step with the same model. Peak memory is that
of whole processes at 10 M parameters: `instar train`, with its evaluation and its checkpoint, and
`bare.py`, which has neither.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contenders import text_of
from instar.config.load import load_config
from instar.data.text.prepare import prepare_dataset
from instar.record.events import Train, read_events
from instar.run.start.preflight import preflight
from report import Case, case, options, parser, publish

TINY = (
    "device=cpu",
    "precision=fp32",
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=64",
    "model.context=64",
    "train.batch_size=4",
    "train.until=[1it]",
    "eval.eval_iters=1",
)
TEN_M = (
    "device=cpu",
    "precision=fp32",
    "model.n_layer=6",
    "model.n_head=6",
    "model.n_embd=384",
    "model.context=256",
    "train.batch_size=8",
    "eval.eval_interval=1000000",
    "eval.eval_iters=4",
)
TORCH_AFTER_HELP = """
import sys
from instar.cli.main import main
main(["--help"])
print(sum(name.partition(".")[0] == "torch" for name in sys.modules))
"""


@dataclass(frozen=True)
class Ended:
    """A process that has ended well."""

    start_time: float
    """Unix time"""
    seconds: float
    peak_mib: float
    """the most memory it held at once, or the benchmark itself when it started it, if that is more"""
    output: str


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--repeats", type=int, default=10, help="of runs; commands three times")
    arguments = words.parse_args()
    run_options = options(arguments)
    quick, repeats = run_options.quick, arguments.repeats
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = [
            f"data.path={folder / 'tokens'}",
            f"data.max_bytes={200_000 if quick else 1_000_000}",
            f"record.out_dir={folder / 'runs'}",
        ]
        loaded_config = load_config(None, data)
        prepare_dataset(loaded_config.config.data, loaded_config.config.seed, say=lambda _: None)
        (folder / "run.yaml").write_text("name: timed\n", encoding="utf-8")
        cases = [
            *commands(folder, data, 1 if quick else 3 * repeats),
            *first_step([*TINY, *data], folder, 1 if quick else repeats),
            *(
                memory("tiny run", [*TINY, *data], folder, repeats=1, steps=2)
                if quick
                else memory("10 M parameters", [*TEN_M, *data], folder, min(3, repeats), steps=6)
            ),
        ]
    publish("startup", cases, run_options)


def commands(folder: Path, data: Sequence[str], repeats: int) -> list[Case]:
    """Wall time of what answers without training."""
    config, run = folder / "run.yaml", folder / "inspected"
    run_command(instar("train", *sets([*TINY, *data, f"record.run_dir={run}"])))
    bars = {"instar --help": 120.0, "instar checkpoint inspect": 200.0}
    command_words = {
        "instar --help": ["--help"],
        "instar config validate": ["config", "validate", str(config)],
        "instar train --dry-run": ["train", str(config), "--dry-run", *sets(data)],
        "instar checkpoint inspect": ["checkpoint", "inspect", str(run)],
    }
    milliseconds: dict[str, list[float]] = {name: [] for name in command_words}
    for _ in range(repeats):
        for name, words in command_words.items():
            milliseconds[name].append(1e3 * run_command(instar(*words)).seconds)
    module_count = run_command([sys.executable, "-c", TORCH_AFTER_HELP]).output.split()[-1]
    return [
        *(case(name, figures, "ms", most=bars.get(name)) for name, figures in milliseconds.items()),
        case("instar --help: modules of torch imported", [float(module_count)], "modules", most=0),
    ]


def first_step(overrides: Sequence[str], folder: Path, repeats: int) -> list[Case]:
    """From the start of the process to the end of a tiny run's first step."""
    instar_times, bare = [], []
    for repeat in range(repeats):
        run = folder / f"first-{repeat}"
        training = run_command(instar("train", *sets([*overrides, f"record.run_dir={run}"])))
        events = read_events(run / "events.jsonl")
        step = next(event for event in events if isinstance(event, Train))
        script = run_command(bare_loop(overrides, 1))
        instar_times.append(step.time - training.start_time)
        bare.append(float(script.output) - script.start_time)
    return [
        case("tiny run: start to first step, instar train", instar_times, "s"),
        case("tiny run: start to first step, bare script", bare, "s"),
        case(
            "tiny run: start to first step, instar train / bare script",
            [instar_time / other for instar_time, other in zip(instar_times, bare, strict=True)],
            "ratio",
            most=1.05,
        ),
    ]


def memory(
    name: str, overrides: Sequence[str], folder: Path, repeats: int, steps: int
) -> list[Case]:
    """Peak resident memory of whole processes."""
    instar_peaks, bare = [], []
    for repeat in range(repeats):
        run_overrides = [
            *overrides,
            f"train.until=[{steps}it]",
            f"record.run_dir={folder / f'm{repeat}'}",
        ]
        instar_peaks.append(run_command(instar("train", *sets(run_overrides))).peak_mib)
        bare.append(run_command(bare_loop(overrides, steps)).peak_mib)
    ratios = [instar_peak / other for instar_peak, other in zip(instar_peaks, bare, strict=True)]
    return [
        case(f"{name}: peak memory, instar train", instar_peaks, "MiB"),
        case(f"{name}: peak memory, bare loop", bare, "MiB"),
        case(f"{name}: peak memory, instar train / bare loop", ratios, "ratio", most=1.0),
    ]


def instar(*words: str) -> list[str]:
    """The command as a person types it."""
    script = Path(sys.executable).with_name("instar")
    front = [str(script)] if script.exists() else [sys.executable, "-m", "instar.cli.main"]
    return [*front, *words]


def bare_loop(overrides: Sequence[str], steps: int) -> list[str]:
    """`bare.py` with the same model, tokens and batch."""
    prepared_run = preflight(load_config(None, overrides), 1)
    shard = text_of(prepared_run).opened.path / "train-00000.safetensors"
    shape = json.dumps(prepared_run.spec.architecture.to_dict())
    script = Path(__file__).with_name("bare.py")
    batch = prepared_run.config.train.batch_size
    return [sys.executable, *map(str, (script, shard, shape, batch, steps))]


def sets(overrides: Sequence[str]) -> list[str]:
    return [word for text in overrides for word in ("--set", text)]


def run_command(command: Sequence[str]) -> Ended:
    """Run a command to its end.

    Raises:
        SystemExit: it ended badly.
    """
    # compiled modules are kept, as anybody has them who called the command before
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        start_time, start = time.time(), time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        file.seek(0)
        output = file.read()
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{output}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Ended(start_time, seconds, usage.ru_maxrss * unit / 2**20, output)


if __name__ == "__main__":
    main()
