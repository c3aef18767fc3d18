"""What a dense model gains from becoming a mixture of experts, at equal compute.

    python benchmarks/experts.py [--quick] [--work DIR] [--workers N]

A GPT of 4 × 128 trains on 1 MB of characters of Python's standard library at a stable rate. At one step copies of the run
are upcycled, live, to 4 experts with one of them per token; one copy goes on dense. Both then use the FLOPs of 500
further steps of the dense model, by `instar.models.cost`, while their rate falls to zero: the upcycled model ends at
the last step that these pay for. Compared are losses on the same held-out samples, seed by seed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from growth import RECIPE
from instar.config.load import load_config
from instar.config.sections import Operation
from instar.data.text.prepare import prepare_dataset
from instar.growth.operators import plan
from instar.models.cost import flops_per_token
from instar.record.events import OperationEvent, read_events
from report import Case, case, options, publish
from segments import Result, Segment, Workshop, place_of, study_parser
from study import Shape

DENSE = "dense"
ARMS = {DENSE: None, "one of 4 experts": 1}
"""experts per token"""
EXPERTS = 4


@dataclass(frozen=True)
class Effort:
    """How long everything lasts."""

    shape: Shape
    before: int
    """steps"""
    after: int
    """steps of the dense model"""
    eval_batches: int
    data_bytes: int
    seeds: tuple[int, ...]


FULL = Effort(
    Shape(layers=4, heads=4, width=128, context=64, vocabulary=100, batch=12),
    before=400,
    after=500,
    eval_batches=64,
    data_bytes=1_000_000,
    seeds=(1, 2, 3),
)
QUICK = replace(
    FULL,
    shape=Shape(layers=1, heads=2, width=16, context=32, vocabulary=300, batch=2),
    before=4,
    after=4,
    eval_batches=2,
    data_bytes=60_000,
    seeds=(1,),
)


def main() -> None:
    arguments = study_parser(__doc__).parse_args()
    run_options = options(arguments)
    effort = QUICK if run_options.quick else FULL
    with place_of(arguments) as work:
        workshop = Workshop(work, settings(effort, work), arguments.workers)
        runs = segments(effort)
        results = workshop.results(list(runs.values()))
        drifts = [drift(work / run.name) for (arm, _), run in runs.items() if arm != DENSE]
    arm_results = {key: results[run.name] for key, run in runs.items()}
    drift_cases = [
        case("logits moved by upcycling, the most", [max(drifts)], "relative", most=1e-5)
    ]
    publish(
        "experts",
        [*drift_cases, *cases(effort, arm_results)],
        run_options,
        runs_at_a_time=arguments.workers,
    )
    if run_options.results is not None:
        records = [
            {"arm": arm, "seed": seed, **asdict(r)} for (arm, seed), r in arm_results.items()
        ]
        text = json.dumps({"runs": records}, indent=2)
        (run_options.results / "experts-runs.json").write_text(text + "\n", encoding="utf-8")


def settings(effort: Effort, work: Path) -> tuple[str, ...]:
    """Of every run; makes the data set."""
    base = (
        *RECIPE,
        *effort.shape.settings(),
        f"model.n_layer={effort.shape.layers}",
        "data.tokenizer=char",
        f"data.max_bytes={effort.data_bytes}",
        f"data.path={work / 'tokens'}",
        "optimizer.lr=2e-3",
        f"learning_rate.warmup_iters={effort.before // 8}",
        f"eval.eval_iters={effort.eval_batches}",
    )
    loaded_config = load_config(None, base)
    prepare_dataset(
        loaded_config.config.data,
        loaded_config.config.seed,
        say=lambda text: print(text, file=sys.stderr),
    )
    return base


def upcycle_operation(per_token: int) -> Operation:
    return Operation("upcycle", EXPERTS, {"num_experts_per_tok": per_token})


def steps_after(effort: Effort, per_token: int | None) -> int:
    """Steps that the compute of the dense model's further steps pays for."""
    dense = effort.shape.architecture(effort.shape.layers)
    if per_token is None:
        return effort.after
    sparse, _ = plan(dense, upcycle_operation(per_token))
    return effort.after * flops_per_token(dense) // flops_per_token(sparse)


def segments(effort: Effort) -> dict[tuple[str, int], Segment]:
    """By arm and seed: the stretch after the growth."""
    segments_by_arm = {}
    for seed in effort.seeds:
        trunk = Segment(f"s{seed}", effort.before, (f"seed={seed}",))
        for arm, per_token in ARMS.items():
            end, schedule = effort.before + steps_after(effort, per_token), "[]"
            if per_token is not None:
                how = f"num_experts_per_tok: {per_token}, when: {{at_step: {effort.before}}}"
                schedule = f"[{{name: upcycle, value: {EXPERTS}, {how}}}]"
            decay = (
                "learning_rate.shape=wsd",
                f"learning_rate.lr_decay_iters={end}",
                f"learning_rate.decay_fraction={1 - effort.before / end}",
            )
            name = f"s{seed}-{per_token or DENSE}"
            segments_by_arm[arm, seed] = Segment(name, end, (f"schedule={schedule}", *decay), trunk)
    return segments_by_arm


def drift(run: Path) -> float:
    """How far the logits moved when the run grew, relative to the largest."""
    every = read_events(run / "events.jsonl")
    (event,) = (e for e in every if isinstance(e, OperationEvent) and e.verb == "GROW")
    difference: float = event.proof["max_logit_diff_relative"]
    return difference


def cases(effort: Effort, arm_results: Mapping[tuple[str, int], Result]) -> list[Case]:
    """Losses, and those of the upcycled models relative to the dense ones."""
    case_list = [
        case(f"{arm}: loss", [arm_results[arm, seed].loss for seed in effort.seeds], "nats")
        for arm in ARMS
    ]
    for arm in ARMS:
        pairs = [(arm_results[arm, seed], arm_results[DENSE, seed]) for seed in effort.seeds]
        if arm == DENSE:
            continue
        losses = [sparse.loss / dense.loss for sparse, dense in pairs]
        case_list.append(
            case(f"{arm}: loss / dense, the worst seed", [max(losses)], "ratio", most=1.0)
        )
        flops = [sparse.flops / dense.flops for sparse, dense in pairs]
        case_list.append(case(f"{arm}: FLOPs / dense", flops, "ratio", most=1.0))
    return case_list


if __name__ == "__main__":
    main()
