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

    started: float
    """Unix time"""
    seconds: float
    peak_mib: float
    """the most memory it held at once, or the benchmark itself when it started it, if that is more"""
    output: str


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--repeats", type=int, default=10, help="of runs; commands three times")
    parsed = words.parse_args()
    chosen = options(parsed)
    quick, repeats = chosen.quick, parsed.repeats
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = [
            f"data.path={folder / 'tokens'}",
            f"data.max_bytes={200_000 if quick else 1_000_000}",
            f"record.out_dir={folder / 'runs'}",
        ]
        loaded = load_config(None, data)
        prepare_dataset(loaded.config.data, loaded.config.seed, say=lambda _: None)
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
    publish("startup", cases, chosen)


def commands(folder: Path, data: Sequence[str], repeats: int) -> list[Case]:
    """Wall time of what answers without training."""
    config, run = folder / "run.yaml", folder / "inspected"
    ended(instar("train", *sets([*TINY, *data, f"record.run_dir={run}"])))
    bars = {"instar --help": 120.0, "instar checkpoint inspect": 200.0}
    asked = {
        "instar --help": ["--help"],
        "instar config validate": ["config", "validate", str(config)],
        "instar train --dry-run": ["train", str(config), "--dry-run", *sets(data)],
        "instar checkpoint inspect": ["checkpoint", "inspect", str(run)],
    }
    taken: dict[str, list[float]] = {name: [] for name in asked}
    for _ in range(repeats):
        for name, words in asked.items():
            taken[name].append(1e3 * ended(instar(*words)).seconds)
    imported = ended([sys.executable, "-c", TORCH_AFTER_HELP]).output.split()[-1]
    return [
        *(case(name, figures, "ms", most=bars.get(name)) for name, figures in taken.items()),
        case("instar --help: modules of torch imported", [float(imported)], "modules", most=0),
    ]


def first_step(overrides: Sequence[str], folder: Path, repeats: int) -> list[Case]:
    """From the start of the process to the end of a tiny run's first step."""
    ours, bare = [], []
    for repeat in range(repeats):
        run = folder / f"first-{repeat}"
        training = ended(instar("train", *sets([*overrides, f"record.run_dir={run}"])))
        events = read_events(run / "events.jsonl")
        step = next(event for event in events if isinstance(event, Train))
        script = ended(bare_loop(overrides, 1))
        ours.append(step.time - training.started)
        bare.append(float(script.output) - script.started)
    return [
        case("tiny run: start to first step, instar train", ours, "s"),
        case("tiny run: start to first step, bare script", bare, "s"),
        case(
            "tiny run: start to first step, instar train / bare script",
            [one / other for one, other in zip(ours, bare, strict=True)],
            "ratio",
            most=1.05,
        ),
    ]


def memory(
    name: str, overrides: Sequence[str], folder: Path, repeats: int, steps: int
) -> list[Case]:
    """Peak resident memory of whole processes."""
    ours, bare = [], []
    for repeat in range(repeats):
        sized = [*overrides, f"train.until=[{steps}it]", f"record.run_dir={folder / f'm{repeat}'}"]
        ours.append(ended(instar("train", *sets(sized))).peak_mib)
        bare.append(ended(bare_loop(overrides, steps)).peak_mib)
    ratios = [one / other for one, other in zip(ours, bare, strict=True)]
    return [
        case(f"{name}: peak memory, instar train", ours, "MiB"),
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
    prepared = preflight(load_config(None, overrides), 1)
    shard = text_of(prepared).opened.path / "train-00000.safetensors"
    shape = json.dumps(prepared.spec.architecture.to_dict())
    script = Path(__file__).with_name("bare.py")
    batch = prepared.config.train.batch_size
    return [sys.executable, *map(str, (script, shard, shape, batch, steps))]


def sets(overrides: Sequence[str]) -> list[str]:
    return [word for text in overrides for word in ("--set", text)]


def ended(command: Sequence[str]) -> Ended:
    """Run a command to its end.

    Raises:
        SystemExit: it ended badly.
    """
    # compiled modules are kept, as anybody has them who called the command before
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        started, begun = time.time(), time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        output = said.read()
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{output}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Ended(started, seconds, usage.ru_maxrss * unit / 2**20, output)


if __name__ == "__main__":
    main()
