"""Tokens per second of a training step: Instar's loop against a bare one, HF and Fabric.

    python benchmarks/throughput.py [--quick] [--threads N] [--heats N]

The contenders (`contenders.py`) are processes that run in turns, a round of steps each, in
random order, while the others wait. Ratios are taken within a round, so that what else the
machine does meets both sides; the figure is their median. Every heat starts them anew: where a
process's memory happens to lie makes it up to 3 % faster or slower for as long as it lives.
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

from instar.config.load import load
from instar.data.text.prepare import prepare
from instar.models.cost import flops_per_token
from instar.models.shape import count_parameters
from instar.record.system import measure_peak_flops
from instar.run.lifecycle.preflight import preflight
from report import Case, case, options, parser, publish

NAMES = {
    "instar": "Instar",
    "bare": "bare PyTorch loop",
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
        ("device=cpu", "precision=fp32", *gpt(5, 4, 128, 128, 16)),
        warmup=10,
        round=10,
        rounds=3,
        heats=5,
    ),
    Size(
        "10 M",
        ("device=cpu", "precision=fp32", *gpt(6, 6, 384, 256, 8)),
        warmup=10,
        round=10,
        rounds=2,
        heats=3,
    ),
)
GPU = Size(
    "124 M",
    ("device=cuda", "precision=bf16", "model.vocab_size=50304", *gpt(12, 12, 768, 1024, 16)),
    warmup=30,
    round=10,
    rounds=3,
    heats=5,
)
QUICK = Size(
    "tiny",
    ("device=cpu", "precision=fp32", "record.log_interval=2", *gpt(1, 2, 32, 32, 4)),
    warmup=2,
    round=2,
    rounds=2,
    heats=1,
)
SAME = (
    "learning_rate.shape=constant",
    "learning_rate.warmup_iters=0",
    "eval.eval_interval=1000000",
)


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--threads", type=int, help="of every contender; default: torch's own")
    words.add_argument("--heats", type=int, metavar="N", help="of every size; default: its own")
    parsed = words.parse_args()
    chosen = options(parsed)
    if parsed.threads:
        torch.set_num_threads(parsed.threads)
    names = present(chosen.quick)
    sizes = (QUICK,) if chosen.quick else (*CPU, *([GPU] if torch.cuda.is_available() else []))
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        data = text_for(Path(folder), 200_000 if chosen.quick else 8_000_000)
        for each in sizes:
            size = replace(each, heats=parsed.heats or each.heats)
            cases += measure(size, (*size.overrides, *SAME, *data), names, parsed.threads)
    libraries = ["transformers", "accelerate", "lightning"]
    installed = [name for name in libraries if importlib.util.find_spec(name)]
    publish("throughput", cases, chosen, libraries=installed, threads=torch.get_num_threads())


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
    return [name for name in NAMES if not missing.get(name)]


def text_for(folder: Path, size: int) -> tuple[str, ...]:
    """Overrides that name `size` bytes of the standard library's source, made into tokens."""
    overrides = (f"data.path={folder / 'tokens'}", f"data.max_bytes={size}")
    loaded = load(None, overrides)
    prepare(loaded.config.data, loaded.config.seed, say=lambda _: None)
    return overrides


def measure(
    size: Size, overrides: Sequence[str], names: Sequence[str], threads: int | None
) -> list[Case]:
    """Speeds, Instar's ratio to each of the others, and its share of the peak."""
    prepared = preflight(load(None, overrides), 1)
    arch, config = prepared.spec.architecture, prepared.config
    precision = torch.bfloat16 if config.precision == "bf16" else torch.float32
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peak = 0.0
    for heat in range(size.heats):
        peak = max(peak, measure_peak_flops(config.device, precision))
        turns = random.Random(heat)
        for name, taken in compete(size, overrides, names, threads, turns).items():
            seconds[name] += taken
        ratio = statistics.median(ratios(seconds, "bare"))
        said = f"{size.name}: heat {heat + 1} of {size.heats}, Instar / bare loop {ratio:.3f}"
        print(said, file=sys.stderr)
    tokens = size.round * config.train.batch_size * arch.context
    speeds = {name: [tokens / s for s in taken] for name, taken in seconds.items()}
    used = [speed * flops_per_token(arch) / peak for speed in speeds["instar"]]
    title = f"{size.name} ({count_parameters(arch).total / 1e6:.3g} M)"
    batch = f"{config.train.batch_size}×{arch.context}"
    return [
        *(case(f"{title}, {batch} tokens: {NAMES[n]}", speeds[n], "tokens/s") for n in names),
        case(f"{title}: Instar / {NAMES['bare']}", ratios(seconds, "bare"), "ratio", least=0.98),
        *(
            case(f"{title}: Instar / {NAMES[n]}", ratios(seconds, n), "ratio", above=1.0)
            for n in names
            if n in NEEDS
        ),
        case(
            f"{title}: Instar's share of the measured peak FLOP/s",
            used,
            "MFU",
            least=0.5 if config.device == "cuda" else None,
        ),
    ]


def ratios(seconds: Mapping[str, Sequence[float]], name: str) -> list[float]:
    """Instar's speed as a multiple of another's, round by round."""
    return [them / us for them, us in zip(seconds[name], seconds["instar"], strict=True)]


def compete(
    size: Size,
    overrides: Sequence[str],
    names: Sequence[str],
    threads: int | None,
    turns: random.Random,
) -> dict[str, list[float]]:
    """Seconds of each contender's rounds in one heat.

    Raises:
        SystemExit: a contender failed, or did other work than Instar, as its first losses show.
    """
    steps = size.warmup + size.round * size.rounds
    asked = {
        "overrides": [*overrides, f"train.until=[{steps + 1}it]"],
        "warmup": size.warmup,
        "round": size.round,
        "steps": steps,
    }
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        there = {name: stack.enter_context(started(name, asked, threads)) for name in names}
        check_same_work({name: one.warm_up() for name, one in there.items()})
        for _ in range(size.rounds):
            # at random: turns that only rotate would leave everybody the same predecessor
            for name in turns.sample(names, len(names)):
                seconds[name].append(there[name].make_round())
    return seconds


class Contender:
    """A process of `contenders.py`: it works when told to, and waits."""

    def __init__(self, name: str, process: subprocess.Popen[str], said: IO[str]) -> None:
        self.name, self.process, self.said = name, process, said

    def warm_up(self) -> list[float]:
        """The losses that it saw."""
        losses: list[float] = self._go()
        return losses

    def make_round(self) -> float:
        """Seconds that the next round took."""
        taken: float = self._go()
        return taken

    def _go(self) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.said.seek(0)
            sys.exit(f"{NAMES[self.name]} failed:\n{self.said.read()}")
        return json.loads(line)


@contextmanager
def started(name: str, asked: Mapping[str, object], threads: int | None) -> Iterator[Contender]:
    script = Path(__file__).with_name("contenders.py")
    environment = dict(os.environ)
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as said,
        subprocess.Popen(
            [sys.executable, str(script), name, json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=environment,
        ) as process,
    ):
        yield Contender(name, process, said)


def check_same_work(losses: Mapping[str, Sequence[float]]) -> None:
    ours = losses["instar"]
    for name, theirs in losses.items():
        same = len(ours) == len(theirs) and all(
            abs(a - b) <= 1e-3 * abs(a) for a, b in zip(ours, theirs, strict=True)
        )
        if not same:
            sys.exit(f"{NAMES[name]} did other work than Instar: losses {theirs}, not {ours}")


if __name__ == "__main__":
    main()
