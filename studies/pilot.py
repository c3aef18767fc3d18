"""What growth saves, predicted by a pilot before the runs, against what it saved.

    python benchmarks/pilot.py [--quick] [--work DIR] [--workers N]

A GPT of 8 × 32 (512 BPE tokens of Python's standard library, none seen twice) is to be grown from 2 layers.
A pilot (`instar schedule pilot`, one for each optimizer and seed) trains the final size from scratch and one schedule,
shortened to a fraction of the steps. From it the savings of three schedules at the full number of steps are
predicted: copies at half and at three quarters of the steps, and 2 → 4 → 8 layers. Then they are run, and so is the
final size from scratch, at two budgets; all have their rate fully decayed. What a schedule saved is 1 - its FLOPs / those
after which the final size from scratch has its loss, by the line through the two budgets against the
logarithm of tokens.

What was tried and predicted is in `pilot-runs.json`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from instar.config.load import load_config
from instar.data.text.prepare import prepare_dataset
from instar.extensions.lab.pilot import run_pilot
from instar.extensions.lab.saving import ExpectedSaving, predict_saving, spending
from instar.extensions.lab.short_runs import ShortRunRequest
from instar.schedule.forecast import checked_forecast
from instar.tasks.task import spec_class
from report import Case, case, options, publish
from segments import Result, Segment, Workshop, place_of, study_parser
from study import Shape

BAR = 5.0
"""Points that a prediction may be off."""
RECIPE = (
    "data.source=stdlib",
    "data.tokenizer=bpe",
    "data.test_fraction=0.0",
    "precision=fp32",
    "device=cpu",
    "model.qk_norm=true",
    "optimizer.weight_decay=0.0",
    "learning_rate.shape=wsd",
    "learning_rate.min_lr_ratio=0.0",
    "record.log_interval=1000",
    "record.sample_tokens=0",
    "record.report=false",
    "checkpoint.every_minutes=null",
)
OPTIMIZERS = {
    "muon": ("optimizer.name=muon", "optimizer.lr=0.005", "optimizer.muon_lr=0.02"),
    "adamw": ("optimizer.name=adamw", "optimizer.lr=0.008"),
}


@dataclass(frozen=True)
class Schedule:
    """A way to the final size: layers at first, and at each share of the steps a factor of layers."""

    name: str
    layers: int
    stacked: tuple[tuple[float, int], ...]

    def settings(self) -> tuple[str, ...]:
        entries = [
            {"name": "stack_layers", "value": factor, "when": {"at_fraction": share}}
            for share, factor in self.stacked
        ]
        return (f"model.n_layer={self.layers}", f"schedule={json.dumps(entries)}")


@dataclass(frozen=True)
class Effort:
    """What is predicted, and with how much work."""

    shape: Shape
    steps: int
    pilot_steps: int
    shorter: float
    """share of the steps, of the second budget of the final size"""
    data_bytes: int
    trials: tuple[tuple[str, int], ...]
    """optimizer and seed"""
    measured: Schedule
    """by the pilot, shortened"""
    unseen: tuple[Schedule, ...]


FULL = Effort(
    Shape(layers=8, heads=2, width=32, context=64, vocabulary=512, batch=8),
    steps=1200,
    pilot_steps=160,
    shorter=0.6,
    data_bytes=8_000_000,
    trials=(("muon", 2), ("adamw", 2), ("muon", 3)),
    measured=Schedule("2 to 8 at 0.6", 2, ((0.6, 4),)),
    unseen=(
        Schedule("2 to 8 at 0.5", 2, ((0.5, 4),)),
        Schedule("2 to 8 at 0.75", 2, ((0.75, 4),)),
        Schedule("2 to 4 to 8 at 0.35 and 0.65", 2, ((0.35, 2), (0.65, 2))),
    ),
)
QUICK = replace(
    FULL,
    shape=Shape(layers=4, heads=2, width=16, context=32, vocabulary=300, batch=2),
    steps=48,
    pilot_steps=40,
    data_bytes=60_000,
    trials=(("muon", 2),),
    measured=Schedule("1 to 4 at 0.6", 1, ((0.6, 4),)),
    unseen=(Schedule("1 to 4 at 0.5", 1, ((0.5, 4),)),),
)


def main() -> None:
    arguments = study_parser(__doc__).parse_args()
    run_options = options(arguments)
    effort = QUICK if run_options.quick else FULL
    case_list: list[Case] = []
    records = []
    with place_of(arguments) as work:
        for optimizer, seed in effort.trials:
            trial = f"{optimizer}, seed {seed}"
            base = settings(effort, optimizer, seed, work.absolute())
            before, cost = predict_savings(effort, trial, base, work.absolute())
            workshop = Workshop(work, base, arguments.workers)
            after = measure_savings(effort, trial, workshop)
            case_list += cases(effort, trial, before, after, cost)
            records += [
                {
                    "trial": trial,
                    "schedule": name,
                    **asdict(saving),
                    "measured": after[name],
                }
                for name, saving in before.items()
            ]
    publish("pilot", case_list, run_options, runs_at_a_time=arguments.workers)
    if run_options.results is not None:
        text = json.dumps(
            {"recipe": RECIPE, "effort": asdict(effort), "predicted": records}, indent=1
        )
        (run_options.results / "pilot-runs.json").write_text(text + "\n", encoding="utf-8")


def settings(effort: Effort, optimizer: str, seed: int, work: Path) -> tuple[str, ...]:
    """Of every run; makes the data set."""
    base = (
        *RECIPE,
        *OPTIMIZERS[optimizer],
        *effort.shape.settings(),
        f"name={optimizer}",
        f"data.max_bytes={effort.data_bytes}",
        f"data.path={work / 'tokens'}",
        f"train.until=[{effort.steps}it]",
        f"learning_rate.warmup_iters={min(50, effort.steps // 8)}",
        f"eval.eval_interval={effort.steps // 24}",
        "eval.eval_iters=16",
        f"seed={seed}",
        "data.seed=2",
    )
    loaded_config = load_config(None, base)
    prepare_dataset(
        loaded_config.config.data,
        loaded_config.config.seed,
        say=lambda text: print(text, file=sys.stderr),
    )
    return base


def predict_savings(
    effort: Effort, trial: str, base: Sequence[str], work: Path
) -> tuple[dict[str, ExpectedSaving], float]:
    """The savings of the schedules that were not measured, by a pilot, and its share of the FLOPs of the
    final size."""
    shared_settings = [*base, f"record.out_dir={work}"]
    request = ShortRunRequest(
        None,
        [*shared_settings, *effort.measured.settings()],
        steps=effort.pilot_steps,
        out=work / f"{file_name(trial)}.pilot.json",
    )
    pilot = run_pilot(request).pilot
    savings = {}
    for schedule in effort.unseen:
        loaded_config = load_config(None, [*shared_settings, *schedule.settings()])
        spec = spec_class(loaded_config.config.task).open(loaded_config, 1)
        compute = spending(checked_forecast(loaded_config, spec, 1))
        savings[schedule.name] = predict_saving(pilot, compute, source=trial)
    spent_in_all = sum(s.flops_per_token * s.tokens for run in pilot.runs for s in run.spent)
    final_flops = pilot.final.flops_per_token * pilot.tokens_per_step * effort.steps
    return savings, spent_in_all / final_flops


def file_name(*words: str) -> str:
    """As the name of a file or folder."""
    return "-".join(words).replace(", seed ", "-s").replace(" ", "-")


def measure_savings(effort: Effort, trial: str, workshop: Workshop) -> dict[str, float]:
    """What the schedules saved, by name."""
    shape = effort.shape

    def segment(name: str, steps: int, *more: str) -> Segment:
        return Segment(file_name(trial, name), steps, more)

    final = f"model.n_layer={shape.layers}"
    scratch = [
        segment(f"scratch-{steps}", steps, final)
        for steps in (round(effort.shorter * effort.steps), effort.steps)
    ]
    grown_segments = {
        schedule.name: segment(schedule.name, effort.steps, *schedule.settings())
        for schedule in effort.unseen
    }
    results = workshop.results([*scratch, *grown_segments.values()])
    short, long = (results[run.name] for run in scratch)
    return {
        name: saved_share(short, long, results[run.name]) for name, run in grown_segments.items()
    }


def saved_share(short: Result, long: Result, grown_run: Result) -> float:
    """1 - FLOPs / those after which the final size from scratch has as low a loss."""
    fall = (short.loss - long.loss) / math.log(long.flops / short.flops)
    return 1 - grown_run.flops / (long.flops * math.exp((long.loss - grown_run.loss) / fall))


def cases(
    effort: Effort,
    trial: str,
    before: Mapping[str, ExpectedSaving],
    after: Mapping[str, float],
    cost: float,
) -> list[Case]:
    """Savings predicted and measured, in points; a saving may be a loss, figures are not negative."""
    case_list = [case(f"{trial}: FLOPs of the pilot / final size from scratch", [cost], "ratio")]
    for schedule in effort.unseen:
        name = schedule.name
        gap = 100 * abs(before[name].share - after[name])
        case_list += [
            case(f"{trial}, {name}: compute predicted", [1 - before[name].share], "ratio"),
            case(f"{trial}, {name}: compute measured", [1 - after[name]], "ratio"),
            case(f"{trial}, {name}: off by", [gap], "points", most=BAR),
        ]
    return case_list


if __name__ == "__main__":
    main()
