"""Seconds from process start to a validation loss: Instar's presets against tuned plain recipes.

    python benchmarks/time_to_loss.py [--quick] [--large] [--seeds 3] [--threads N]

Everybody has the same characters (1 MB of the Python standard library's source, split by file), a
4 × 128 GPT of context 64 (parameters within 2 %; the plain contenders' is GPT-2, a preset has its own positions
and convolutions), and the same evaluation: the whole validation set, every token once. The plain contenders make 2,000 steps of 768 tokens under the same
AdamW recipe, whose peak rate is the best of 1e-3, 2e-3, 4e-3 and 6e-3. The target of a seed is the loss that the bare loop reaches at its end, and 0.015 on top:
what one plain recipe differs from another by chance. Contenders are processes, one after the other,
in an order that turns with every seed. One grows from 2 layers to 4, also within 2 % in the end.

With --large, a 6 × 384 GPT of context 256, 10 M parameters, on 3 MB of characters. The bare loop makes 800 steps of 1,024 tokens,
at the best rate of 2.5e-4, 5e-4, 1e-3 and 2e-3; one contender grows from 3 layers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from instar.config.load import load_config
from instar.data.text.prepare import prepare_dataset
from instar.record.events import Eval, read_events
from instar.run.start.preflight import preflight
from instar.schedule.checks import load_checked
from plain_recipes import Recipe
from report import Case, case, options, parser, publish
from throughput import NEEDS, present

CHANCE = 0.015
"""nats: the finals of one plain recipe with three seeds lie within 0.02 of each other"""


@dataclass(frozen=True)
class Effort:
    """A model, and how long everybody trains it."""

    recipe: Recipe
    fast_batch: int
    growth: tuple[str, ...]
    """what makes the contender that grows into this model"""
    seeds: int
    data_bytes: int
    plain_steps: int
    fast_steps: int
    grown_steps: int
    """of the contender that grows"""

    @property
    def shape(self) -> tuple[str, ...]:
        recipe = self.recipe
        shape = {"n_layer": recipe.layers, "n_head": recipe.heads, "n_embd": recipe.width}
        shape["context"] = recipe.context
        return tuple(f"model.{key}={value}" for key, value in shape.items())


def grown_from(layers: int) -> tuple[str, ...]:
    """Overrides with which half of the steps train this many layers, and the rest twice as many."""
    schedule = (
        '{"name": "stack_layers", "value": 2, "how": "interleave", "when": {"at_fraction": 0.5}}'
    )
    return (f"model.n_layer={layers}", f"schedule=[{schedule}]")


FULL = Effort(
    Recipe(layers=4, heads=4, width=128, context=64, batch=12, peak=4e-3),
    fast_batch=12,
    growth=grown_from(2),
    seeds=3,
    data_bytes=1_000_000,
    plain_steps=2000,
    fast_steps=240,
    grown_steps=275,
)
LARGE = Effort(
    Recipe(layers=6, heads=6, width=384, context=256, batch=4, peak=5e-4),
    fast_batch=8,
    growth=grown_from(3),
    seeds=3,
    data_bytes=3_000_000,
    plain_steps=800,
    fast_steps=30,
    grown_steps=28,
)
QUICK = replace(FULL, seeds=1, data_bytes=60_000, plain_steps=4, fast_steps=4, grown_steps=4)
NAMES = {
    "instar-fast": "Instar, preset fast",
    "instar-fast-grown": "Instar, preset fast, grown",
    "instar-plain": "Instar, preset plain",
    "bare": "bare PyTorch loop",
    "bare-bf16": "bare PyTorch loop, bf16 autocast",
    "fabric": "Lightning Fabric",
    "hf": "HF Trainer",
}
BARS = {"instar-fast": 0.25, "instar-fast-grown": 0.15, "instar-plain": 1.0}
LARGE_BARS = {"instar-fast": 0.4, "instar-fast-grown": 0.4}
FP32_BARS = {"instar-fast-grown": 0.2}
"""where `precision: auto` is fp32"""
OTHERS = [name for name in NAMES if name != "bare"]
"""than the loop that sets the target"""


@dataclass(frozen=True)
class Reached:
    """Evaluations of one process: seconds since it was started, and the loss."""

    evaluations: tuple[tuple[float, float], ...]
    precision: str = "fp32"

    @property
    def final(self) -> float:
        return self.evaluations[-1][1]

    def seconds_to(self, target: float) -> float | None:
        """When the loss was first at or below the target."""
        return next((at for at, loss in self.evaluations if loss <= target), None)


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--large", action="store_true", help="10 M parameters instead of 0.8 M")
    words.add_argument("--seeds", type=int, help=f"default: {FULL.seeds}")
    words.add_argument("--threads", type=int, help="of every contender; default: torch's own")
    for flag, text in (
        ("--without", "leave this contender out"),
        ("--once", "train this contender with the first seed only"),
    ):
        words.add_argument(flag, action="append", default=[], choices=OTHERS, help=text)
    arguments = words.parse_args()
    run_options = options(arguments)
    effort = QUICK if run_options.quick else LARGE if arguments.large else FULL
    available = present(run_options.quick)
    names = [
        name
        for name in NAMES
        if name not in arguments.without and (name in available or name not in NEEDS)
    ]
    if arguments.threads:
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    results: dict[str, list[Reached]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        data = text_for(Path(folder), effort.data_bytes)
        for seed in range(1, (arguments.seeds or effort.seeds) + 1):
            turn = seed % len(names)
            for name in [*names[turn:], *names[:turn]]:
                if seed > 1 and name in arguments.once:
                    continue
                result = run(name, seed, effort, data, Path(folder))
                results[name].append(result)
                text = f"seed {seed}: {NAMES[name]}: {result.final:.4f}"
                print(f"{text} after {result.evaluations[-1][0]:.1f} s", file=sys.stderr)
        instar_names = [name for name in names if name.startswith("instar")]
        sizes = {name: parameters(name, effort, data) for name in instar_names}
    publish(
        "time_to_loss_large" if arguments.large else "time_to_loss",
        cases(results, sizes, LARGE_BARS if arguments.large else bars(results)),
        run_options,
        threads=os.environ.get("OMP_NUM_THREADS", "default"),
    )


def text_for(folder: Path, size: int) -> tuple[str, ...]:
    """Overrides that name characters of the standard library's source, made into tokens."""
    overrides = ("data.tokenizer=char", f"data.max_bytes={size}", f"data.path={folder / 'tokens'}")
    loaded_config = load_config(None, overrides)
    prepare_dataset(loaded_config.config.data, loaded_config.config.seed, say=lambda _: None)
    return overrides


def parameters(name: str, effort: Effort, data: Sequence[str]) -> int:
    """Of the final model."""
    loaded_config = load_checked(None, (*of(name, effort), *data, "train.until=[100it]"))
    return preflight(loaded_config, 1).forecast.stages[-1].parameters.total


def of(name: str, effort: Effort) -> tuple[str, ...]:
    """Overrides that make one of our contenders."""
    preset = name.removeprefix("instar-").removesuffix("-grown")
    batch = effort.recipe.batch if preset == "plain" else effort.fast_batch
    overrides = [f"preset={preset}", *effort.shape, f"train.batch_size={batch}"]
    if preset == "plain":
        overrides.append(f"optimizer.lr={effort.recipe.peak}")
    return (*overrides, *(effort.growth if name.endswith("-grown") else ()))


def run(name: str, seed: int, effort: Effort, data: Sequence[str], folder: Path) -> Reached:
    """One contender's process, from its start to its end."""
    steps = {"instar-fast": effort.fast_steps, "instar-fast-grown": effort.grown_steps}.get(
        name, effort.plain_steps
    )
    if name.startswith("instar"):
        return run_instar(name, seed, steps, effort, data, folder)
    script = Path(__file__).with_name("plain_recipes.py")
    request = {
        "data": str(folder / "tokens"),
        "seed": seed,
        "steps": steps,
        "recipe": asdict(effort.recipe),
    }
    start = time.time()
    process = subprocess.run(
        [sys.executable, str(script), name, json.dumps(request)],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        sys.exit(f"{NAMES[name]} failed:\n{process.stderr}")
    records = [
        json.loads(line) for line in process.stdout.splitlines() if line.startswith('{"time"')
    ]
    return Reached(tuple((record["time"] - start, record["loss"]) for record in records))


def run_instar(
    name: str, seed: int, steps: int, effort: Effort, data: Sequence[str], folder: Path
) -> Reached:
    run_dir = folder / f"{name}-{seed}"
    settings = (
        *of(name, effort),
        *data,
        f"seed={seed}",
        f"eval.eval_interval={steps}",
        "record.log_interval=100",
        f"record.run_dir={run_dir}",
    )
    command = [sys.executable, "-m", "instar.cli.main", "train", "--until", f"{steps}it"]
    start = time.time()
    process = subprocess.run(
        [*command, *(word for text in settings for word in ("--set", text))],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        sys.exit(f"{NAMES[name]} failed:\n{process.stderr}")
    events = read_events(run_dir / "events.jsonl")
    precision = load_config(str(run_dir / "run.yaml")).config.precision
    return Reached(
        tuple((e.time - start, e.loss) for e in events if isinstance(e, Eval)), precision
    )


def bars(results: Mapping[str, Sequence[Reached]]) -> dict[str, float]:
    """The bars of the small model, which depend on what trains faster here."""
    in_fp32 = {name for name, runs in results.items() if runs[0].precision == "fp32"}
    return BARS | {name: bar for name, bar in FP32_BARS.items() if name in in_fp32}


def cases(
    results: Mapping[str, Sequence[Reached]], sizes: Mapping[str, int], bars: Mapping[str, float]
) -> list[Case]:
    """Losses, seconds to the target, and their ratios to the bare loop's, seed by seed; those that train once, with the first seed."""
    targets = [result.final + CHANCE for result in results["bare"]]
    above = {
        name: [result.final - target for result, target in zip(runs, targets, strict=False)]
        for name, runs in results.items()
    }
    late = {name for name, excess in above.items() if max(excess) > 0}
    seconds = {
        name: [
            result.seconds_to(target) or result.evaluations[-1][0]
            for result, target in zip(runs, targets, strict=False)
        ]
        for name, runs in results.items()
    }
    against = {
        name: [duration / bare for duration, bare in zip(durations, seconds["bare"], strict=False)]
        for name, durations in seconds.items()
    }
    return [
        *(case(f"parameters: {NAMES[name]}", [float(n)], "count") for name, n in sizes.items()),
        *(
            case(f"final validation loss: {NAMES[name]}", [r.final for r in runs], "nats")
            for name, runs in results.items()
        ),
        *(
            case(f"final loss above the target: {NAMES[name]}", above[name], "nats", most=0.0)
            for name in sorted(late)
        ),
        *(
            case(
                f"time to {'its end' if name in late else 'target'}: {NAMES[name]}", durations, "s"
            )
            for name, durations in seconds.items()
        ),
        *(
            case(f"time of {NAMES[name]} / bare loop", ratio, "ratio", most=bars.get(name))
            for name, ratio in against.items()
            if name != "bare"
        ),
    ]


if __name__ == "__main__":
    main()
