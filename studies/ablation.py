"""What each ingredient of the preset `fast` is worth.

    python benchmarks/ablation.py [--quick] [--base plain] [--seeds 3] [--workers N]

The model, the characters and the batches of `time_to_loss.py`. In `fast`, one ingredient at a time is replaced by what
`plain` has, or one is added that neither has, such as a ramp; with `--base plain`, one at a time is added to `plain`. Each
variant trains twice per seed, to the end of the schedule each time: for the steps of `fast`, after which the losses are
compared at equal tokens, and for twice as many. The processor time to the loss of the base is on the line through both, in the
logarithm of the time over the loss, up to half and four times the time of the first. It is that of a whole process with one
thread, from its start, with compilation. Processes run side by side, one for each core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from instar.processes.cores import usable_cores
from instar.record.events import Eval, read_events
from report import Case, case, options, parser, publish
from time_to_loss import FULL, QUICK, text_for

BASES = ("fast", "plain")
PRESET = "the preset"

INGREDIENTS: Mapping[tuple[str, str], Mapping[str, tuple[object, object]]] = {
    ("Muon", "AdamW"): {
        "optimizer.name": ("muon", "adamw"),
        "optimizer.lr": (0.016, 0.004),
        "optimizer.weight_decay": (0.0, 0.1),
        "optimizer.no_decay": ([], ["*.bias", "*norm*"]),
    },
    ("linear decay to 0 after 20 steps", "cosine to a tenth after 100 steps"): {
        "learning_rate.shape": ("wsd", "cosine"),
        "learning_rate.warmup_iters": (20, 100),
        "learning_rate.decay_fraction": (1.0, 1.0),
        "learning_rate.min_lr_ratio": (0.0, 0.1),
    },
    ("rotary positions", "learned positions"): {
        "model.positions": ("rope", "learned"),
        "model.rope_base": (200.0, 200.0),
    },
    ("convolutions before MLPs", "no convolutions"): {"model.conv_size": (4, None)},
    ("embeddings times 11.3", "embeddings times 1"): {"model.embedding_multiplier": (11.3, 1.0)},
    ("no biases", "biases"): {"model.bias": (False, True)},
    ("no clipping", "clipping at 1"): {"train.clip": (None, 1.0)},
    ("shuffled windows", "windows at random places"): {"data.order": ("shuffled", "random")},
    ("bf16 where it is faster", "fp32"): {"precision": ("auto", "fp32")},
}
"""Ingredients of `fast` and what `plain` has in their place, with the values of both by key. Initial values, GELU and
LayerNorm are the same in both."""

QUINTIC = {"optimizer.ns_iteration": "quintic", "optimizer.ns_steps": 5}
NEITHER: Mapping[str, Mapping[str, object]] = {
    "QK-norm": {"model.qk_norm": True},
    "momentum of 0.9": {"optimizer.momentum": 0.9},
    "RMSNorm": {"model.norm": "rmsnorm"},
    "squared ReLU": {"model.activation": "relu2"},
    "SwiGLU": {"model.activation": "swiglu", "model.n_mlp": 341},
    "five quintic steps of Muon": QUINTIC,
    "compile": {"compile": True},
}
"""Values that neither preset has."""


@dataclass(frozen=True)
class Ended:
    """A whole run."""

    loss: float
    seconds: float
    """of processors"""


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--base", choices=BASES, default=BASES[0], help="default: fast")
    words.add_argument("--seeds", type=int, help=f"default: {FULL.seeds}")
    words.add_argument("--workers", type=int, help="processes at a time; default: one per core")
    arguments = words.parse_args()
    run_options = options(arguments)
    effort = QUICK if run_options.quick else FULL
    seeds = range(1, (arguments.seeds or effort.seeds) + 1)
    runs_by_name: dict[str, list[tuple[Ended, Ended]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = text_for(Path(folder), effort.data_bytes)

        def train_twice(job: tuple[int, str, Mapping[str, object]]) -> tuple[Ended, Ended]:
            seed, name, values = job
            run_dir = Path(folder) / f"{name}-{seed}".replace(" ", "-")
            short, long = (
                train(
                    arguments.base,
                    seed,
                    times * effort.fast_steps,
                    values,
                    data,
                    run_dir / str(times),
                )
                for times in (1, 2)
            )
            summary = f"seed {seed}: {name}: {short.loss:.4f} and {long.loss:.4f}"
            print(f"{summary} after {short.seconds:.1f} and {long.seconds:.1f} s", file=sys.stderr)
            return short, long

        # a seed after the other: what changes on the machine changes for all, and each seed is published
        with ThreadPoolExecutor(arguments.workers or usable_cores()) as pool:
            for seed in seeds:
                jobs = [(seed, *variant) for variant in variants(arguments.base, run_options.quick)]
                for (_, name, _), runs in zip(jobs, pool.map(train_twice, jobs), strict=True):
                    runs_by_name.setdefault(name, []).append(runs)
                publish(
                    "ablation" if arguments.base == "fast" else f"ablation-{arguments.base}",
                    cases(arguments.base, runs_by_name),
                    run_options,
                    history=seed == seeds[-1],
                    threads=1,
                    seeds=seed,
                )


def variants(base: str, quick: bool) -> list[tuple[str, Mapping[str, object]]]:
    """The base, and what it is with one change each."""
    other = 1 - BASES.index(base)
    all_of_them = {
        PRESET: {},
        **{
            f"with {names[other]}": {key: pair[other] for key, pair in keys.items()}
            for names, keys in INGREDIENTS.items()
        },
        **{
            f"with {name}": values
            for name, values in NEITHER.items()
            if base == "fast" or values is not QUINTIC
        },
        **ramps(),
    }
    quickly = (PRESET, "with no conv", "with conv", "with a ramp", "with growth")
    return [entry for entry in all_of_them.items() if not quick or entry[0].startswith(quickly)]


def ramps() -> dict[str, Mapping[str, object]]:
    """Ramps of the batch and the context at equal tokens, and growth to the same shape."""

    def halfway(name: str, share: float, **more: object) -> list[object]:
        return [{"name": name, "value": 2, "when": {"at_fraction": share}, **more}]

    return {
        # half of the batch for half of the tokens, hence for two thirds of the steps
        "with a ramp of the batch": {
            "train.batch_size": 6,
            "schedule": halfway("change_batch_size", 0.5),
        },
        "with a ramp of the context": {
            "data.context": 32,
            "train.batch_size": 24,
            "eval.context": 64,
            "schedule": halfway("change_context", 0.5, tokens="keep"),
        },
        "with growth from 2 layers at 0.5": {
            "model.n_layer": 2,
            "schedule": halfway("stack_layers", 0.5, how="interleave"),
        },
    }


def train(
    preset: str,
    seed: int,
    steps: int,
    values: Mapping[str, object],
    data: Sequence[str],
    run_dir: Path,
) -> Ended:
    """One process, which evaluates at its end only; as many tokens as `steps` of 12 samples have."""
    tokens = steps * 12 * 64
    run_settings = {
        "preset": preset,
        "train.batch_size": 12,
        "train.until": [f"{tokens}tok"],
        "seed": seed,
        "eval.eval_interval": 10**6,
        "record.log_interval": 10**6,
        "record.report": False,
        "record.sample_tokens": 0,
        "record.run_dir": str(run_dir),
    }
    pairs = dict(text.split("=", 1) for text in FULL.shape)
    settings = pairs | run_settings | dict(values)
    texts = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in settings.items()]
    sets = [word for text in (*texts, *data) for word in ("--set", text)]
    output = run_dir.with_suffix(".txt")
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "instar.cli.main", "train", *sets],
            stdout=file,
            stderr=file,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{preset} with {dict(values)} failed:\n{output.read_text()}")
    events = read_events(run_dir / "events.jsonl")
    losses = [event.loss for event in events if isinstance(event, Eval)]
    return Ended(losses[-1], used.ru_utime + used.ru_stime)


def seconds_to(target: float, short: Ended, long: Ended) -> float:
    """The processor time to a loss, on the line through both runs; see the head of this file."""
    gain = max(short.loss - long.loss, 1e-9)
    exponent = min(2.0, max(-1.0, (short.loss - target) / gain))
    seconds: float = short.seconds * (long.seconds / short.seconds) ** exponent
    return seconds


def cases(base: str, runs_by_name: Mapping[str, Sequence[tuple[Ended, Ended]]]) -> list[Case]:
    """The loss of the preset, what each change adds to it, and the time that it takes to make up for it."""
    bases, ingredient_names = runs_by_name[PRESET], {f"with {plain}" for _, plain in INGREDIENTS}
    finals = [case(f"{base}: final validation loss", [short.loss for short, _ in bases], "nats")]
    finals.append(case(f"{base}: processor time", [short.seconds for short, _ in bases], "s"))
    for name, runs in runs_by_name.items():
        if name == PRESET:
            continue
        pairs = list(zip(runs, bases, strict=True))
        more = [short.loss - base_run.loss for (short, _), (base_run, _) in pairs]
        times = [
            seconds_to(base_run.loss, *variant_runs) / base_run.seconds
            for variant_runs, (base_run, _) in pairs
        ]
        finals.append(case(f"{name}: loss more than the preset's", more, "Δ nats"))
        # an ingredient of fast has to be worth its place
        bar = 1.0 if base == "fast" and name in ingredient_names else None
        finals.append(case(f"{name}: time to its loss / its time", times, "ratio", least=bar))
    return finals


if __name__ == "__main__":
    main()
