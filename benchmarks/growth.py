"""Compute that growing saves: grown runs against one that had the final size from the start.

    python benchmarks/growth.py [--quick] [--work DIR] [--workers N]

A GPT of 6 × 64 (0.3 M parameters besides the tables; 1,024 BPE tokens of Python source, none seen
twice) trains on 20 tokens per parameter: a warm-up, a stable rate, a linear decay to zero over the
last fifth. The loss that it comes to is the target, seed by seed. Every arm has a stable trunk and, at
several budgets, a whole decay of its own; loss against the logarithm of compute, fitted for each
seed, gives the compute at which the arm reaches the target. FLOPs are those of all stages
(6 · matrix parameters + 12 · layers · context · width for each token).

Before that each arm has four trials, with a seed that is not used again, at two fifths of the compute:
rate and warm-up of the final size, which all arms then have; the best size that does not grow; how
long a re-warming lasts; which growth, and when. What was tried is in `growth-runs.json`, too.

About three hours on two cores. What is done stays in --work, and a study that was broken off goes on;
what its runs came to is kept beside the results, also where their folders are gone.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from instar.config.load import load
from instar.data.text.prepare import prepare
from instar.data.text.shards import open_dataset
from instar.models.shape import count_parameters
from report import case, options, publish
from segments import Result, Segment, Workshop, place_of, study_parser
from study import Arm, Change, Growth, Rate, Shape, ends_of, last_step
from verdict import cases, table

T = TypeVar("T")

SOURCE = f"{sysconfig.get_path('purelib')}/[st][ory]*[hsy]/**/*.py"
"""Python source: torch, sympy, and what else the pattern finds beside Instar."""
RECIPE = (
    "data.tokenizer=bpe",
    "data.test_fraction=0.0",
    "precision=fp32",
    "learning_rate.shape=constant",
    "learning_rate.min_lr_ratio=0.0",
    "eval.eval_interval=1000000",
    "record.log_interval=1000",
    "record.sample_tokens=0",
    "record.report=false",
    "checkpoint.every_minutes=null",
    "device=cpu",
)


@dataclass(frozen=True)
class Study:
    """What is compared, and with how much work."""

    shape: Shape
    steps: int
    """of the final size, at the full budget"""
    data_bytes: int
    val_fraction: float
    seeds: tuple[int, ...]
    scratch: tuple[float, ...]
    """budgets of this arm, as shares of the full one"""
    fixed: tuple[float, ...]
    rewarmed: tuple[float, ...]
    grown: tuple[float, ...]
    arms: tuple[str, ...]
    """the grown ones: what becomes of the optimizer's memory, or `fresh`"""
    trial_seed: int
    trial_share: float
    rates: tuple[Rate, ...]
    sizes: tuple[int, ...]
    warmups: tuple[int, ...]
    rewarm_at: float
    """share of the final size's steps"""
    growths: tuple[Growth, ...]

    @property
    def full_flops(self) -> float:
        return self.steps * self.shape.flops_per_step(self.shape.layers)


FULL = Study(
    Shape(layers=6, heads=4, width=64, context=128, vocabulary=1024, batch=16),
    steps=3500,
    data_bytes=60_000_000,
    val_fraction=0.012,
    seeds=(1, 2, 3, 4, 5),
    scratch=(0.55, 0.75, 1.0),
    fixed=(0.6, 1.0),
    rewarmed=(0.75, 1.0),
    grown=(0.6, 0.75, 0.9),
    arms=("asymmetric", "mapped", "reset", "fresh"),
    trial_seed=100,
    trial_share=0.4,
    rates=(Rate(6e-3, 100), Rate(12e-3, 100), Rate(24e-3, 100), Rate(12e-3, 300)),
    sizes=(2, 3, 4, 5),
    warmups=(50, 100, 200, 400),
    rewarm_at=0.3,
    growths=(
        Growth(3, ((0.65, "stack_layers=2", 6),)),
        Growth(3, ((0.65, "insert_layers=3 where=even", 6),)),
        Growth(2, ((0.5, "stack_layers=3", 6),)),
        Growth(
            2,
            (
                (0.35, "insert_layers=2 where=even", 4),
                (0.65, "insert_layers=2 where=even", 6),
            ),
        ),
    ),
)
QUICK = replace(
    FULL,
    shape=Shape(layers=2, heads=2, width=16, context=32, vocabulary=300, batch=2),
    steps=20,
    data_bytes=60_000,
    val_fraction=0.1,
    seeds=(1,),
    scratch=(0.5, 1.0),
    fixed=(),
    rewarmed=(),
    grown=(0.7, 0.9),
    arms=("asymmetric",),
    rates=(Rate(6e-3, 2),),
    sizes=(1,),
    warmups=(2,),
    growths=(Growth(1, ((0.3, "stack_layers=2", 2),)),),
)


@dataclass(frozen=True)
class Choice:
    """What the trials decided, and what each of them came to: its loss, by what was tried."""

    rate: Rate
    size: int
    warmup: int
    growth: Growth
    trials: Mapping[str, Mapping[str, float]]


def main() -> None:
    parsed = study_parser(__doc__).parse_args()
    chosen = options(parsed)
    study = QUICK if chosen.quick else FULL
    with place_of(parsed) as work:
        base = settings(study, work)
        check_data(study, work)
        workshop = Workshop(work, base, parsed.workers, kept_of(chosen.results, work))
        choice = decide(study, workshop)
        arms = arms_of(study, choice)
        ends = ends_of(arms)
        again = repeated(next(iter(ends[arms[0]].values())))
        every = [segment for found in ends.values() for segment in found.values()]
        results = workshop.results([*every, again])
    found = {
        arm: tuple(results[segment.name] for segment in segments.values())
        for arm, segments in ends.items()
    }
    differs = abs(results[again.name].loss - found[arms[0]][0].loss)
    final = count_parameters(study.shape.architecture(study.shape.layers))
    made = [
        case("final size: parameters without tables", [float(final.non_embedding)], "count"),
        case("the shortest run twice: losses differ by", [differs], "nats"),
        *cases(found),
    ]
    publish("growth", made, chosen, runs_at_a_time=parsed.workers)
    print(table(found))
    if chosen.results is not None:
        keep(chosen.results, study, choice, found)


def settings(study: Study, work: Path) -> tuple[str, ...]:
    """Of every run; makes the data set."""
    data = (
        f"data.source={SOURCE}",
        f"data.max_bytes={study.data_bytes}",
        f"data.val_fraction={study.val_fraction}",
        f"data.path={work / 'tokens'}",
    )
    base = (*RECIPE, *study.shape.settings(), *data)
    loaded = load(None, base)
    prepare(loaded.config.data, loaded.config.seed, say=lambda text: print(text, file=sys.stderr))
    return base


def kept_of(folder: Path | None, work: Path) -> Path | None:
    """Where the results of all runs on these very data are kept."""
    if folder is None:
        return None
    data = open_dataset(work / "tokens").fingerprint
    return folder / f"growth-segments-{data[:12]}.json"


def check_data(study: Study, work: Path) -> None:
    """The smallest size sees the most tokens for its compute; it must not see one twice."""
    shape = study.shape
    there = len(open_dataset(work / "tokens").split("train"))
    fewest = min(*study.sizes, shape.layers)
    steps = last_step(shape, fewest, (), max(study.fixed, default=0.0) * study.full_flops)
    if steps * shape.batch * shape.context > there:
        sys.exit(f"{there:,} tokens of text are fewer than the smallest size trains on")


def decide(study: Study, workshop: Workshop) -> Choice:
    """The trials of each thing that an arm may choose; of a single candidate, none."""
    final, steps = study.shape.layers, study.trial_share * study.steps

    def best(arms: Mapping[T, Arm]) -> tuple[T, dict[str, float]]:
        if len(arms) == 1:
            return next(iter(arms)), {}
        ends = ends_of(list(arms.values()))
        results = workshop.results([one for found in ends.values() for one in found.values()])
        losses = {
            candidate: results[next(iter(ends[arm].values())).name].loss
            for candidate, arm in arms.items()
        }
        winner = min(losses, key=losses.__getitem__)
        return winner, {str(candidate): loss for candidate, loss in losses.items()}

    def trial(name: str, rate: Rate, layers: int, changes: tuple[Change, ...] = ()) -> Arm:
        flops = study.trial_share * study.full_flops
        ends = (last_step(study.shape, layers, changes, flops),)
        return Arm(f"trial-{name}", study.trial_seed, rate, layers, ends, changes)

    rate, rates = best({each: trial("rate", each, final) for each in study.rates})
    size, sizes = best({each: trial("size", rate, each) for each in study.sizes})
    begin = round(study.rewarm_at * steps)
    warmup, warmups = best(
        {
            each: trial(f"rewarm-{each}", rate, final, (rewarming(begin, each, final),))
            for each in study.warmups
        }
    )
    growth, growths = best(
        {
            each: trial(
                f"growth-{number}", rate, each.layers, changes_of(each, "asymmetric", steps)
            )
            for number, each in enumerate(study.growths)
        }
    )
    trials = {"rate": rates, "size": sizes, "rewarming": warmups, "growth": growths}
    return Choice(rate, size, warmup, growth, trials)


def rewarming(step: int, warmup: int, layers: int) -> Change:
    """The rate begins anew at a step, and nothing else changes."""
    settings = (f"learning_rate.warmup_iters={warmup}",)
    return Change(step, ("reset_lr_schedule",), layers, settings, resets_rate=True)


def changes_of(growth: Growth, arm: str, steps: float) -> tuple[Change, ...]:
    """A growth's operations in one of the grown arms; `steps` are the final size's."""
    changes = []
    layers = growth.layers
    for share, operation, after in growth.stages:
        how = f"{operation} moments={arm}"
        if arm == "fresh":
            how = f"insert_layers={after - layers} where=even from=normal moments=reset"
        changes.append(Change(round(share * steps), (how,), after))
        layers = after
    return tuple(changes)


def arms_of(study: Study, choice: Choice) -> list[Arm]:
    """Every arm at every seed; the first is the final size from scratch."""
    shape, final = study.shape, study.shape.layers
    arms: list[Arm] = []

    def add(name: str, budgets: Sequence[float], layers: int, *changes: Change) -> None:
        if budgets:
            ends = [last_step(shape, layers, changes, b * study.full_flops) for b in budgets]
            arms.extend(
                Arm(name, seed, choice.rate, layers, tuple(ends), changes) for seed in study.seeds
            )

    add("scratch", study.scratch, final)
    add("fixed", study.fixed, choice.size)
    begin = round(study.rewarm_at * study.steps)
    add("rewarmed", study.rewarmed, final, rewarming(begin, choice.warmup, final))
    for name in study.arms:
        changes = changes_of(choice.growth, name, study.steps)
        add(name, study.grown, choice.growth.layers, *changes)
    # a study that is broken off has whole seeds
    return sorted(arms, key=lambda arm: arm.seed)


def repeated(segment: Segment) -> Segment:
    """The same once more, from the beginning, in folders of its own."""
    parent = repeated(segment.parent) if segment.parent else None
    return replace(segment, name=f"again-{segment.name}", parent=parent)


def keep(folder: Path, study: Study, choice: Choice, found: Mapping[Arm, Sequence[Result]]) -> None:
    """The table, and all settings, trials and runs for whoever wants something else from them."""
    kept = {
        "study": asdict(study),
        "recipe": RECIPE,
        "chosen": {**asdict(choice), "trials": dict(choice.trials)},
        "runs": [
            {"arm": arm.name, "seed": arm.seed, **asdict(result)}
            for arm, results in found.items()
            for result in results
        ],
    }
    text = json.dumps(kept, indent=2, ensure_ascii=False)
    (folder / "growth-runs.json").write_text(text + "\n", encoding="utf-8")
    (folder / "growth-table.md").write_text(table(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
