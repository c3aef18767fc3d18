"""What a run does after it has grown, by what its optimizer remembers of the time before.

    python benchmarks/moments.py [--quick] [--work DIR] [--workers N]

A GPT of 4 × 64 trains under AdamW at a stable rate. At one step copies of the run grow, live, by an
operation that preserves the function, with the moments mapped, with those of copies begun at m = 0
(asymmetric), or all of them reset; one copy goes on ungrown. The validation loss, on fixed samples, is
taken every few steps. Said are its worst rise over the last loss before, and after how many steps it
is below that for good. Two copies with one state remain copies, so operations are chosen that copy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from growth import RECIPE, SOURCE
from instar.config.load import load_config
from instar.data.text.prepare import prepare_dataset
from instar.record.events import Eval, OperationEvent, read_events
from report import Case, case, options, publish
from segments import Segment, Workshop, place_of, study_parser
from study import Shape

MODES = ("mapped", "asymmetric", "reset")
NOTHING = "not grown"
OPERATIONS = {
    "widen_mlp": "name: widen_mlp, value: x2, how: split",
    "insert_layers": "name: insert_layers, value: 2, where: even",
    "widen_hidden": "name: widen_hidden, value: x2, how: duplicate",
}


@dataclass(frozen=True)
class Effort:
    """How long everything lasts."""

    shape: Shape
    before: int
    """steps"""
    after: int
    interval: int
    """steps between evaluations"""
    eval_batches: int
    data_bytes: int
    seeds: tuple[int, ...]
    operations: tuple[str, ...]


FULL = Effort(
    Shape(layers=4, heads=4, width=64, context=128, vocabulary=1024, batch=16),
    before=600,
    after=150,
    interval=5,
    eval_batches=16,
    data_bytes=10_000_000,
    seeds=(1, 2, 3),
    operations=tuple(OPERATIONS),
)
QUICK = replace(
    FULL,
    shape=Shape(layers=1, heads=2, width=16, context=32, vocabulary=300, batch=2),
    before=6,
    after=4,
    interval=2,
    eval_batches=2,
    data_bytes=60_000,
    seeds=(1,),
    operations=("widen_mlp",),
)

Curve = Mapping[int, float]
"""Validation loss by steps since the growth; 0: just before it."""


def main() -> None:
    arguments = study_parser(__doc__).parse_args()
    run_options = options(arguments)
    effort = QUICK if run_options.quick else FULL
    with place_of(arguments) as work:
        workshop = Workshop(work, settings(effort, work), arguments.workers)
        runs = segments(effort)
        workshop.results(list(runs.values()))
        curves = {key: curve(work / run.name, effort) for key, run in runs.items()}
        drifts = [drift(work / run.name) for (_, mode, _), run in runs.items() if mode != NOTHING]
    drift_cases = [case("loss moved by growing, the most", [max(drifts)], "nats", most=1e-5)]
    publish(
        "moments",
        [*drift_cases, *cases(effort, curves)],
        run_options,
        runs_at_a_time=arguments.workers,
    )
    if run_options.results is not None:
        records = [
            {"operation": operation, "moments": mode, "seed": seed, "loss": dict(curve)}
            for (operation, mode, seed), curve in curves.items()
        ]
        text = json.dumps({"curves": records}, indent=2)
        (run_options.results / "moments-curves.json").write_text(text + "\n", encoding="utf-8")


def settings(effort: Effort, work: Path) -> tuple[str, ...]:
    """Of every run; makes the data set."""
    base = (
        *RECIPE,
        *effort.shape.settings(),
        "precision=fp32",
        f"model.n_layer={effort.shape.layers}",
        f"data.source={SOURCE}",
        f"data.max_bytes={effort.data_bytes}",
        f"data.path={work / 'tokens'}",
        "optimizer.lr=4e-3",
        f"learning_rate.warmup_iters={effort.before // 6}",
        f"eval.eval_iters={effort.eval_batches}",
    )
    loaded_config = load_config(None, base)
    prepare_dataset(
        loaded_config.config.data,
        loaded_config.config.seed,
        say=lambda text: print(text, file=sys.stderr),
    )
    return base


def segments(effort: Effort) -> dict[tuple[str, str, int], Segment]:
    """By operation, moments and seed: the stretch after the growth."""
    segments_by_key = {}
    end, interval = effort.before + effort.after, f"eval.eval_interval={effort.interval}"
    for seed in effort.seeds:
        trunk = Segment(f"s{seed}", effort.before, (f"seed={seed}",))
        ungrown = Segment(f"s{seed}-alone", end, (interval,), trunk)
        segments_by_key[NOTHING, NOTHING, seed] = ungrown
        for operation in effort.operations:
            for mode in MODES:
                when = f"when: {{at_step: {effort.before}}}"
                entry = f"schedule=[{{{OPERATIONS[operation]}, moments: {mode}, {when}}}]"
                name = f"s{seed}-{operation}-{mode}"
                segments_by_key[operation, mode, seed] = Segment(
                    name, end, (interval, entry), trunk
                )
    return segments_by_key


def curve(run: Path, effort: Effort) -> dict[int, float]:
    """Of a run that went on from the trunk."""
    trunk = json.loads((run.parent / f"{run.name.partition('-')[0]}.json").read_text())
    events = read_events(run / "events.jsonl")
    after = {e.step - effort.before: e.loss for e in events if isinstance(e, Eval)}
    return {0: trunk["loss"], **{step: loss for step, loss in after.items() if step > 0}}


def drift(run: Path) -> float:
    """How far the loss on the probe moved when the run grew."""
    every = read_events(run / "events.jsonl")
    (event,) = (e for e in every if isinstance(e, OperationEvent) and e.verb == "GROW")
    return abs(event.proof["delta_loss"])


def cases(effort: Effort, curves: Mapping[tuple[str, str, int], Curve]) -> list[Case]:
    """Worst rise, steps to be below again, and the loss at the end, over the seeds."""
    case_list = []
    for operation in (NOTHING, *effort.operations):
        for mode in (NOTHING,) if operation == NOTHING else MODES:
            seed_curves = [curves[operation, mode, seed] for seed in effort.seeds]
            what = NOTHING if mode == NOTHING else f"{operation}, {mode}"
            case_list += [
                case(f"{what}: worst rise", [worst_rise(curve) for curve in seed_curves], "nats"),
                case(
                    f"{what}: below for good after",
                    [recovery(curve) for curve in seed_curves],
                    "steps",
                ),
                case(
                    f"{what}: loss at the end", [curve[max(curve)] for curve in seed_curves], "nats"
                ),
            ]
    return case_list


def worst_rise(curve: Curve) -> float:
    """Over the last loss before, at any evaluation; 0 if there is none."""
    return max(0.0, max(curve.values()) - curve[0])


def recovery(curve: Curve) -> float:
    """The first evaluation from which on the loss stays below the last one before; where it does
    not come to that, the last one."""
    above = [step for step, loss in curve.items() if loss >= curve[0]]
    return float(min((step for step in curve if step > max(above)), default=max(curve)))


if __name__ == "__main__":
    main()
