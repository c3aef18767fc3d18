"""How long a run stands still to grow, against one step; and what a mask costs once it is folded.

    python benchmarks/operations.py [--quick] [--compiled]

A trainer makes steps in this process and grows in between, through the same function as in a run:
planning, applying the plan to parameters and moments, proving the label, and whatever must be made
anew around the model. A first step after growth may be slower than the next ones; that counts too.
Then a model that grew under a mask, now folded away, takes turns with one that was born that size.
With --compiled, instead: compiled models grow, each time from an empty cache, with nothing compiled beforehand and
with `compile_stages`. That takes minutes, of which the C++ compiler has most.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from instar.config.sections import Operation
from instar.run.changes import scheduled
from instar.run.start.build import compile_stages
from instar.run.trainer import Trainer
from pauses import SIZES, Size, seconds_of, trainer_of
from report import Case, case, options, parser, publish
from throughput import gpt

OPERATIONS = (
    Operation("widen_mlp", "x1.25"),
    Operation("insert_layers", 1),
    Operation("add_heads", 2),
    Operation("widen_hidden", "x1.25"),
)
COMPILED = Operation("widen_mlp", "x1.25")
LATER = "schedule=[{name: widen_mlp, value: x1.25, when: {at_step: 1000000}}]"
MASKED = Operation("widen_mlp", "x1.25", {"mask": 1})
FOLD = Operation("fold_masks")


@dataclass(frozen=True)
class Plan:
    """A model, and how often each thing is done."""

    size: Size
    rounds: int
    """turns of the folded model and of the one born that size"""
    steps: int
    """of a turn"""


PLANS = (Plan(replace(SIZES[0], repeats=3), rounds=8, steps=2),)
LARGE = (replace(SIZES[1], repeats=2),)
"""of which only the pauses are measured"""
QUICK = (Plan(Size("tiny", gpt(1, 2, 16, 16, 2), steps=2, repeats=1), rounds=2, steps=2),)


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--compiled", action="store_true", help="only: models that are compiled")
    words.add_argument("--repeats", type=int, metavar="N", help="default: 3 at 10 M, 2 at 124 M")
    arguments = words.parse_args()
    run_options = options(arguments)
    plans = QUICK if run_options.quick else PLANS
    if run_options.quick or not arguments.compiled:
        cases: list[Case] = []
        for plan in plans:
            cases += pauses(plan.size, arguments.repeats, run_options.quick)
            cases += folding_cases(plan, run_options.quick)
        for size in () if run_options.quick else LARGE:
            cases += pauses(size, arguments.repeats, run_options.quick)
        publish("operations", cases, run_options)
    if run_options.quick or arguments.compiled:
        publish(
            "operations_compiled",
            [case for plan in plans for case in compiled(plan.size, run_options.quick)],
            run_options,
        )


def pauses(size: Size, repeats: int | None, quick: bool) -> list[Case]:
    """Seconds that each operation costs a run, as multiples of a step before it."""
    repeats = repeats or size.repeats
    ratios: dict[str, list[float]] = {operation.name: [] for operation in OPERATIONS}
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            trainer = trainer_of(size, Path(folder), quick)
            with closing(trainer):
                seconds_of(trainer.step)
                for operation in OPERATIONS:
                    ratios[operation.name].append(pause(trainer, operation, size.steps))
        print(f"{size.name}: {repeat + 1} of {repeats}", file=sys.stderr)
    return [
        case(f"{size.name}: pause of {name} / step", multiples, "steps", most=2.0)
        for name, multiples in ratios.items()
    ]


def pause(trainer: Trainer, operation: Operation, steps: int) -> float:
    """Steps for which the run stands still."""
    before = turn(trainer, steps)
    return stall(trainer, operation, steps) / before


def stall(trainer: Trainer, operation: Operation, steps: int) -> float:
    """Seconds for which the run stands still."""
    stood = seconds_of(lambda: carry_out(trainer, operation))
    first, after = seconds_of(trainer.step), turn(trainer, steps)
    return stood + max(0.0, first - after)


def compiled(size: Size, quick: bool) -> list[Case]:
    """Seconds for which a compiled model stands still to grow, and that compiling its stages takes."""
    stalls: dict[bool, list[float]] = {False: [], True: []}
    starts = list[float]()
    if quick:  # a C++ compiler takes 10 s for a kernel
        torch.compile = partial(torch.compile, backend="aot_eager")
    for repeat in range(size.repeats):
        for before in (False, True):
            torch.compiler.reset()
            overrides = ("compile=true", f"compile_stages={str(before).lower()}", LATER)
            compiling = replace(size, overrides=(*size.overrides, *overrides))
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")
                with closing(trainer_of(compiling, Path(folder), quick)) as trainer:
                    seconds = seconds_of(partial(compile_stages, trainer.state, trainer.parts))
                    starts += [seconds] * before
                    seconds_of(trainer.step)
                    stalls[before].append(stall(trainer, COMPILED, size.steps))
        print(f"{size.name}, compiled: {repeat + 1} of {size.repeats}", file=sys.stderr)
    name = f"{size.name}, compiled"
    return [
        case(f"{name}: pause of {COMPILED.name}, nothing compiled before", stalls[False], "s"),
        case(f"{name}: pause of {COMPILED.name}, compile_stages", stalls[True], "s"),
        case(
            f"{name}: pause of {COMPILED.name}, compile_stages / not",
            [with_it / without for without, with_it in zip(*stalls.values(), strict=True)],
            "ratio",
        ),
        case(f"{name}: compile_stages before the first step", starts, "s"),
    ]


def folding_cases(plan: Plan, quick: bool) -> list[Case]:
    """Steps of a model whose mask is folded away, against those of one born that size."""
    ratios = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, ExitStack() as stack:
        grown_trainer = trainer_of(plan.size, Path(folder), quick)
        stack.enter_context(closing(grown_trainer))
        seconds_of(grown_trainer.step)
        carry_out(grown_trainer, MASKED)
        seconds_of(grown_trainer.step)
        carry_out(grown_trainer, FOLD)
        wide = grown_trainer.state.in_force.architecture.n_mlp
        size = Size("born", (*plan.size.overrides, f"model.n_mlp={wide}"), plan.size.steps, 1)
        born = trainer_of(size, Path(folder), quick)
        stack.enter_context(closing(born))
        for trainer in (grown_trainer, born):
            turn(trainer, plan.steps)
        chance = random.Random(0)
        for _ in range(plan.rounds):
            order = [grown_trainer, born]
            chance.shuffle(order)
            seconds = {id(trainer): turn(trainer, plan.steps) for trainer in order}
            ratios.append(seconds[id(born)] / seconds[id(grown_trainer)])
    name = f"{plan.size.name}: tokens/s with the mask folded away / born that size"
    return [case(name, ratios, "ratio", least=0.99)]


def carry_out(trainer: Trainer, operation: Operation) -> None:
    trainer.state = scheduled.carry_out(trainer.state, trainer.parts, operation)


def turn(trainer: Trainer, steps: int) -> float:
    return statistics.median(seconds_of(trainer.step) for _ in range(steps))


if __name__ == "__main__":
    main()
