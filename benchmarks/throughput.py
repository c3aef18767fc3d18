"""Tokens per second of a training step: Instar's loop against a bare one, HF and Fabric.

    python benchmarks/throughput.py [--quick] [--threads N] [--heats N]

The contenders (`contenders.py`) are processes that run in turns, a round of steps each, in
random order, while the others wait. With one thread on a CPU, seconds are those of the processor,
those of our thread that reads ahead included. Ratios are taken within a round, so that what else
the machine does meets both sides. Every heat starts the processes anew: where a process's memory
happens to lie makes it faster or slower for as long as it lives. The figure is the median of the
heats' medians. The most memory of a process, with its libraries, is compared as well.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from instar.config.load import load_config
from instar.data.text.prepare import prepare_dataset
from instar.models.cost import flops_per_token
from instar.models.shape import count_parameters
from instar.record.device import measure_peak_flops
from instar.run.start.preflight import preflight
from report import Case, case, options, parser, publish

NAMES = {
    "instar": "Instar",
    "bare": "bare PyTorch loop",
    "plain": "bare loop of a plain GPT-2",
    "hf": "HF Trainer",
    "fabric": "Lightning Fabric",
}
NEEDS = {
    "hf": ("transformers", "accelerate"),
    "fabric": ("lightning",),
}


@dataclass(frozen=True)
class Size:
    """A model, a batch and how often."""

    name: str
    overrides: tuple[str, ...]
    warmup: int
    round: int
    """steps; a multiple of the log interval, since Instar is held where it speaks"""
    rounds: int
    """of each contender in a heat"""
    heats: int
    best: tuple[str, ...] = ()
    """the best settings, which are compared with a bare loop in float32 and with one of the same settings"""


@dataclass(frozen=True)
class Entry:
    """A process that takes part."""

    contender: str
    """its name in `contenders.py`"""
    overrides: tuple[str, ...] = ()
    """beside those of all"""


@dataclass
class Measured:
    """What the rounds of the entries took, by name, in the order of heats."""

    seconds: dict[str, list[list[float]]]
    """[heat][round]"""
    peak_bytes: dict[str, list[float]]
    """[heat]"""

    def ratios(self, name: str) -> list[float]:
        """Instar's speed as a multiple of another's: each heat's median over its rounds."""
        return [
            statistics.median(
                other / us for other, us in zip(other_rounds, instar_rounds, strict=True)
            )
            for other_rounds, instar_rounds in zip(
                self.seconds[name], self.seconds["instar"], strict=True
            )
        ]

    def speeds(self, name: str, amount: float) -> list[float]:
        """`amount` per second, of each heat."""
        return [amount / statistics.median(rounds) for rounds in self.seconds[name]]

    def memory(self, name: str) -> list[float]:
        """Instar's most memory as a multiple of another's, by heat."""
        pairs = zip(self.peak_bytes["instar"], self.peak_bytes[name], strict=True)
        return [us / other for us, other in pairs]


def gpt(layers: int, heads: int, width: int, context: int, batch: int) -> tuple[str, ...]:
    return (
        f"model.n_layer={layers}",
        f"model.n_head={heads}",
        f"model.n_embd={width}",
        f"model.context={context}",
        f"train.batch_size={batch}",
    )


CPU = (
    Size(
        "1 M",
        ("device=cpu", "precision=fp32", "record.log_interval=5", *gpt(5, 4, 128, 128, 16)),
        warmup=5,
        round=5,
        rounds=4,
        heats=5,
    ),
    Size(
        "10 M",
        ("device=cpu", "precision=fp32", "record.log_interval=2", *gpt(6, 6, 384, 256, 8)),
        warmup=2,
        round=2,
        rounds=3,
        heats=3,
        best=("precision=auto", "compile=true"),
    ),
)
GPU = Size(
    "124 M",
    (
        "device=cuda",
        "precision=bf16",
        "compile=true",
        "model.vocab_size=50304",
        *gpt(12, 12, 768, 1024, 16),
    ),
    warmup=20,
    round=20,
    rounds=3,
    heats=3,
)
QUICK = Size(
    "tiny",
    ("device=cpu", "precision=fp32", "record.log_interval=2", *gpt(1, 2, 32, 32, 4)),
    warmup=2,
    round=2,
    rounds=2,
    heats=1,
    best=("precision=bf16",),
)
SAME = (
    "learning_rate.shape=constant",
    "learning_rate.warmup_iters=0",
    "eval.eval_interval=1000000",
)


def main() -> None:
    words = parser(__doc__)
    words.add_argument(
        "--threads",
        type=int,
        help="of every contender; default: 1 on a CPU alone, so that processor time can be taken",
    )
    words.add_argument("--heats", type=int, metavar="N", help="of every size; default: its own")
    arguments = words.parse_args()
    run_options = options(arguments)
    on_gpu = torch.cuda.is_available()
    threads: int | None = arguments.threads or (None if on_gpu else 1)
    if threads:
        torch.set_num_threads(threads)
    names = present(run_options.quick)
    sizes = (QUICK,) if run_options.quick else (*CPU, *([GPU] if on_gpu else []))
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        data = text_for(Path(folder), 200_000 if run_options.quick else 4_000_000)
        for preset_size in sizes:
            size = replace(preset_size, heats=arguments.heats or preset_size.heats)
            overrides = (*size.overrides, *SAME, *data)
            cases += measure(size, overrides, names, threads)
            if size.best:
                cases += measure_best(size, overrides, threads)
    libraries = ["transformers", "accelerate", "lightning"]
    library_names = [name for name in libraries if importlib.util.find_spec(name)]
    publish(
        "throughput", cases, run_options, libraries=library_names, threads=torch.get_num_threads()
    )


def present(quick: bool) -> list[str]:
    """The contenders that can run; all of them, except in a smoke run."""
    missing = {
        name: [module for module in modules if importlib.util.find_spec(module) is None]
        for name, modules in NEEDS.items()
    }
    lacking = sorted({module for modules in missing.values() for module in modules})
    if lacking and not quick:
        sys.exit(
            f"not installed: {', '.join(lacking)}; pip install -c constraints.txt -e '.[bench]'"
        )
    return [name for name in NAMES if name != "plain" and not missing.get(name)]


def text_for(folder: Path, size: int) -> tuple[str, ...]:
    """Overrides that name `size` bytes of the standard library's source, made into tokens."""
    overrides = (f"data.path={folder / 'tokens'}", f"data.max_bytes={size}")
    loaded_config = load_config(None, overrides)
    prepare_dataset(loaded_config.config.data, loaded_config.config.seed, say=lambda _: None)
    return overrides


def measure(
    size: Size, overrides: Sequence[str], names: Sequence[str], threads: int | None
) -> list[Case]:
    """Speeds, Instar's ratios to the others, and its share of the peak."""
    prepared_run = preflight(load_config(None, overrides), 1)
    arch, config = prepared_run.spec.architecture, prepared_run.config
    precision = torch.bfloat16 if config.precision == "bf16" else torch.float32
    peak = measure_peak_flops(config.device, precision)
    differ = 1e-3 if config.precision == "fp32" else 0.02
    entries = {name: Entry(name) for name in names}
    measurement = compete(size, overrides, entries, threads, differ=differ)
    peak = max(peak, measure_peak_flops(config.device, precision))
    tokens = size.round * config.train.batch_size * arch.context
    used = measurement.speeds("instar", tokens * flops_per_token(arch) / peak)
    title = f"{size.name} ({count_parameters(arch).total / 1e6:.3g} M)"
    batch = f"{config.train.batch_size}×{arch.context}"
    return [
        *(
            case(f"{title}, {batch} tokens: {NAMES[n]}", measurement.speeds(n, tokens), "tokens/s")
            for n in names
        ),
        case(f"{title}: Instar / {NAMES['bare']}", measurement.ratios("bare"), "ratio", least=0.99),
        *(
            case(f"{title}: Instar / {NAMES[n]}", measurement.ratios(n), "ratio", least=1.1)
            for n in names
            if n == "plain"
        ),
        *(
            case(f"{title}: Instar / {NAMES[n]}", measurement.ratios(n), "ratio", above=1.0)
            for n in names
            if n in NEEDS
        ),
        case(
            f"{title}: memory, Instar / {NAMES['bare']}",
            measurement.memory("bare"),
            "ratio",
            most=1.0,
        ),
        case(
            f"{title}: Instar's share of the measured peak FLOP/s",
            used,
            "MFU",
            least=0.5 if config.device == "cuda" else None,
        ),
    ]


def measure_best(size: Size, overrides: Sequence[str], threads: int | None) -> list[Case]:
    """Instar's speed with the best settings, against bare loops in float32 and with the same settings."""
    entries = {
        "instar": Entry("instar", size.best),
        "same": Entry("bare", size.best),
        "float32": Entry("bare"),
    }
    measurement = compete(size, overrides, entries, threads, differ=0.02)
    title = f"{size.name}, {', '.join(size.best)}"
    return [
        case(
            f"{title}: Instar / bare loop in float32",
            measurement.ratios("float32"),
            "ratio",
            least=1.4,
        ),
        case(
            f"{title}: Instar / bare loop, the same", measurement.ratios("same"), "ratio", least=1.0
        ),
        case(f"{title}: memory, Instar / bare loop", measurement.memory("same"), "ratio", most=1.0),
    ]


def compete(
    size: Size,
    overrides: Sequence[str],
    entries: Mapping[str, Entry],
    threads: int | None,
    *,
    differ: float = 1e-3,
) -> Measured:
    """Run all heats.

    Args:
        differ: how much losses may differ from Instar's, relatively.

    Raises:
        SystemExit: a contender failed, or did other work than Instar, as its first losses show.
    """
    steps = size.warmup + size.round * size.rounds
    requests = {
        name: {
            "overrides": [*overrides, *entry.overrides, f"train.until=[{steps + 1}it]"],
            "warmup": size.warmup,
            "round": size.round,
            "steps": steps,
        }
        for name, entry in entries.items()
    }
    measurement = Measured({name: [] for name in entries}, {name: [] for name in entries})
    for heat in range(size.heats):
        turns = random.Random(heat)
        seconds: dict[str, list[float]] = {name: [] for name in entries}
        with ExitStack() as stack:
            contenders = {
                name: stack.enter_context(start_contender(entry.contender, requests[name], threads))
                for name, entry in entries.items()
            }
            losses = {name: contender.warm_up() for name, contender in contenders.items()}
            check_same_work(losses, differ)
            for _ in range(size.rounds):
                # at random: turns that only rotate would leave everybody the same predecessor
                for name in turns.sample(list(entries), len(entries)):
                    round_s, peak_bytes = contenders[name].make_round()
                    seconds[name].append(round_s)
                    if len(seconds[name]) == size.rounds:
                        measurement.peak_bytes[name].append(peak_bytes)
        for name, rounds in seconds.items():
            measurement.seconds[name].append(rounds)
        ratios = {
            name: f"{measurement.ratios(name)[-1]:.3f}" for name in entries if name != "instar"
        }
        message = f"{size.name}: heat {heat + 1} of {size.heats}, Instar / others {ratios}"
        print(message, file=sys.stderr)
    return measurement


class Contender:
    """A process of `contenders.py`: it works when told to, and waits."""

    def __init__(self, name: str, process: subprocess.Popen[str], stderr: IO[str]) -> None:
        self.name, self.process, self.stderr = name, process, stderr

    def warm_up(self) -> list[float]:
        """The losses that it saw."""
        losses: list[float] = self._go()
        return losses

    def make_round(self) -> tuple[float, int]:
        """Seconds that the next round took, and the most bytes of memory so far."""
        seconds, peak_bytes = self._go()
        return seconds, peak_bytes

    def _go(self) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.stderr.seek(0)
            sys.exit(f"{NAMES[self.name]} failed:\n{self.stderr.read()}")
        return json.loads(line)


@contextmanager
def start_contender(
    name: str, request: Mapping[str, object], threads: int | None
) -> Iterator[Contender]:
    script = Path(__file__).with_name("contenders.py")
    environment = dict(os.environ)
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as stderr,
        subprocess.Popen(
            [sys.executable, str(script), name, json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        ) as process,
    ):
        yield Contender(name, process, stderr)


def check_same_work(losses: Mapping[str, Sequence[float]], differ: float) -> None:
    instar_losses = losses["instar"]
    for name, other_losses in losses.items():
        same = len(instar_losses) == len(other_losses) and all(
            abs(a - b) <= differ * abs(a) for a, b in zip(instar_losses, other_losses, strict=True)
        )
        if not same:
            sys.exit(
                f"{name} did other work than Instar: losses {other_losses}, not {instar_losses}"
            )


if __name__ == "__main__":
    main()
