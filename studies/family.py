"""FLOPs of a family of three sizes from one training, against each size from scratch to the same loss.

    python benchmarks/family.py [--quick] [--work DIR] [--workers N]

`preset: family` trains GPTs of 2, 4 and 8 × 32 on the data of `growth.py` with Muon: one trunk that grows by copies, and a branch of
each smaller size that decays beside it. Each size from scratch has the decay that `growth.py` found best for it, fully decayed at the
end of each of two budgets; the line through them gives the FLOPs after which it has the member's loss. What the
family costs is every step that it makes, those that members have in common once.

What is known is published after each seed. All runs are kept in `family-runs.json`; with --work a benchmark that was broken off
goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from curves import MOST as BEYOND
from curves import Point, fit_curve, interval
from growth import EIGHT, TINY, prepare_data
from instar.config.load import load_config
from report import Case, case, options, publish
from segments import Result, Segment, Workshop, place_of, study_parser
from study import WARMUP, Arm, Run, Shape, flops_per_step, segments

MOST = 0.6
"""Of the FLOPs of all sizes from scratch."""


@dataclass(frozen=True)
class Effort:
    """What is compared, with how much work."""

    shape: Shape
    """of the largest size"""
    steps: int
    """of its run"""
    rate: float
    decay: float
    """of runs from scratch, as a share of their steps"""
    seeds: tuple[int, ...]
    shorter: float = 0.7
    """share of a member's steps, of a shorter budget of its size from scratch"""


FULL = Effort(EIGHT, steps=1150, rate=0.02, decay=0.5, seeds=(1, 2, 3, 4))
QUICK = Effort(TINY, steps=240, rate=0.02, decay=0.5, seeds=(1,))


@dataclass(frozen=True)
class Member:
    """A size of the family."""

    shape: Shape
    branch: str
    """its name; empty: the trunk, which is the largest"""
    steps: int
    """of its whole run"""
    own_steps: int
    """of these, steps that no larger size has in common with it"""


def main() -> None:
    arguments = study_parser(__doc__).parse_args()
    run_options = options(arguments)
    effort = QUICK if run_options.quick else FULL
    with place_of(arguments) as work:
        base = prepare_data(work, effort.shape.vocabulary, run_options.quick)
        results_file = run_options.results / "family-runs.json" if run_options.results else None
        workshop = Workshop(work, base, arguments.workers, results_file)
        sizes = members(effort, base)
        pairs = []
        for seed in effort.seeds:
            pairs.append(compare_sizes(effort, sizes, seed, workshop))
            publish("family", cases(sizes, pairs), run_options, runs_at_a_time=arguments.workers)


def settings(effort: Effort, seed: int) -> tuple[str, ...]:
    """Of the family's run."""
    return (
        *effort.shape.settings(),
        "preset=family",
        f"model.n_layer={effort.shape.layers}",
        f"learning_rate.warmup_iters={WARMUP}",
        "optimizer.lr=0.005",
        f"optimizer.muon_lr={effort.rate}",
        f"seed={seed}",
    )


def members(effort: Effort, base: Sequence[str]) -> list[Member]:
    """The sizes that the preset makes, the largest last."""
    config = load_config(
        None, (*base, *settings(effort, 0), f"train.until={effort.steps}it")
    ).config
    sizes = []
    for entry in config.schedule:
        if entry.name == "branch":
            assert entry.when is not None
            assert entry.when.at_fraction is not None
            at = math.ceil(entry.when.at_fraction * effort.steps)
            own_steps = (entry.model_extra or {})["iters"]
            shape = replace(effort.shape, layers=int(str(entry.value).removesuffix("L")))
            sizes.append(Member(shape, str(entry.value), at + own_steps, own_steps))
    return [*sizes, Member(effort.shape, "", effort.steps, 0)]


def compare_sizes(
    effort: Effort, sizes: Sequence[Member], seed: int, workshop: Workshop
) -> list[tuple[float, float]]:
    """FLOPs of each member beside those of larger ones, and of its size from scratch to the same loss."""
    name = f"family-s{seed}-{effort.steps}"
    names = {size: f"{name}-{size.branch}" if size.branch else name for size in sizes}
    branches = tuple((names[size], size.branch, size.steps) for size in sizes if size.branch)
    family = Segment(name, effort.steps, settings(effort, seed), branches=branches)
    scratch = {
        size: [
            Run(arm, seed, round(share * size.steps))
            for arm in [Arm("muon", size.shape, effort.rate, effort.decay, (), size.shape.context)]
            for share in (effort.shorter, 1.0)
        ]
        for size in sizes
    }
    every = [run for runs in scratch.values() for run in runs]
    results = workshop.results([family, *segments(every)])
    pairs = []
    for size in sizes:
        member: Result = results[names[size]]
        line = fit_curve(
            [Point(results[r.name].flops, results[r.name].loss) for r in scratch[size]]
        )
        own_flops = size.own_steps * flops_per_step(size.shape) if size.branch else member.flops
        pairs.append((own_flops, min(BEYOND * member.flops, line.flops_at(member.loss))))
    return pairs


def cases(sizes: Sequence[Member], pairs: Sequence[Sequence[tuple[float, float]]]) -> list[Case]:
    """The family's FLOPs as a share of those from scratch, and how much of them each size is worth."""
    ratios = [
        sum(family_flops for family_flops, _ in seed) / sum(scratch for _, scratch in seed)
        for seed in pairs
    ]
    between = interval(ratios)
    case_list = [
        case("family of three, all decayed: compute", [between.mean], "ratio", most=MOST),
        case("family of three, all decayed: at least", [between.low], "ratio"),
        case("family of three, all decayed: at most", [between.high], "ratio"),
    ]
    for number, size in enumerate(sizes):
        scratch = [seed[number][1] / sum(cost for _, cost in seed) for seed in pairs]
        case_list.append(
            case(f"{size.shape.layers} layers: share of the FLOPs from scratch", scratch, "ratio")
        )
    return case_list


if __name__ == "__main__":
    main()
