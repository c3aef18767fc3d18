"""Compute that growing saves: grown runs against runs of the final size, both tuned with equal effort and fully decayed.

    python studies/growth/growth.py [--quick] [--work DIR] [--workers N] [--only COLUMN …]

Each column of the study is a final size (GPTs of 8 × 32 and 12 × 32; 512 BPE tokens of Python source, none seen twice) and
a horizon in tokens per parameter, under Muon. With seeds that are not used again, as many trials for each choose how the final
size is trained from scratch and how to grow: a coordinate descent over the rate of matrices, the rate of what Muon leaves to AdamW,
the length of the decay, the depth for which rates are meant, and of growth the plan. Then the other seeds train what was
chosen, from scratch and grown, at two budgets each, and the final size as the first edition of the study did. Every run has a
warm-up, a stable rate and a linear decay to zero at its own end; runs with the same beginning are branches of one trunk. The line
through the grown budgets, loss against the logarithm of FLOPs, gives the FLOPs at which growing has the loss of the final size of
the same seed.

What is known so far is published after each column. With --work a study that was broken off goes on; what every run came to,
trials included, is kept beside the results, so that a published run is not made again.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from columns import GROWN, SCRATCH, Column, Plan
from instar.config.language import LanguageConfig
from instar.config.load import load_config
from instar.data.text.prepare import prepare_dataset
from instar.data.text.shards import open_dataset
from report import Case, Options, case, options, publish
from search import Choice, descend
from segments import Result, Workshop, place_of, study_parser
from study import Arm, Run, Shape, segments
from verdict import Outcome, cases, mean_loss, table

SOURCE = f"{sysconfig.get_path('purelib')}/[st][ory]*[hsy]/**/*.py"
"""Python source: torch, sympy, and what else the pattern finds beside Instar."""
RECIPE = (
    "data.tokenizer=bpe",
    "data.test_fraction=0.0",
    "precision=fp32",
    "learning_rate.min_lr_ratio=0.0",
    "eval.eval_interval=1000000",
    "record.log_interval=1000",
    "record.sample_tokens=0",
    "record.report=false",
    "checkpoint.every_minutes=null",
    "device=cpu",
)
EIGHT = Shape(layers=8, heads=2, width=32, context=64, vocabulary=512, batch=16)
TWELVE = replace(EIGHT, layers=12)
SEEDS = (1, 2, 3, 4)
LONGER = (0.7, 0.92)
"""Budgets of growth where it saves less, around the loss of the final size."""
NEAR = 0.05
"""What the share of seconds may be above that of FLOPs."""
COLUMNS = (
    Column("Muon, 8 × 32, 10", EIGHT, 10, SEEDS, 0.75, trials=12),
    Column("Muon, 12 × 32, 10", TWELVE, 10, SEEDS, 0.75, trials=12),
    Column("Muon, 8 × 32, 20", EIGHT, 20, SEEDS, 0.75, trials=6, budgets=LONGER),
    Column("Muon, 12 × 32, 20", TWELVE, 20, SEEDS, 0.75, trials=8, budgets=LONGER),
)
TINY = Shape(layers=4, heads=2, width=16, context=32, vocabulary=300, batch=2)
QUICK = (
    Column(
        "Muon, 4 × 16, 1",
        TINY,
        1,
        (1,),
        0.75,
        trials=2,
        plans=(Plan(4, ((0.4, 2), (0.7, 2))),),
        start=0,
        trial_seeds=(100,),
    ),
)


class UnknownRunError(Exception):
    """A run has not been made."""


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="COLUMN", help="leave out all other columns")
    parser.add_argument("--known", action="store_true", help="publish what is known; train nothing")
    parser.add_argument(
        "--seconds",
        type=int,
        metavar="N",
        help="only: time runs of N seeds of the first column, each from scratch and grown",
    )
    arguments = parser.parse_args()
    run_options = options(arguments)
    columns = [
        column
        for column in (QUICK if run_options.quick else COLUMNS)
        if arguments.only is None or column.name in arguments.only
    ]
    if not columns:
        parser.error(f"--only: columns are {', '.join(repr(column.name) for column in COLUMNS)}")
    with place_of(arguments) as work:
        base = prepare_data(work, columns[0].shape.vocabulary, run_options.quick)
        check_data(columns, work)
        workshop = Workshop(
            work, base, arguments.workers, results_file_of(run_options.results, work)
        )
        if arguments.seconds is not None:
            publish("growth_seconds", seconds(columns[0], workshop, arguments.seconds), run_options)
            return
        for column in () if arguments.known else columns:
            best = {way: best_of(trials_of(column, way, workshop)) for way in (SCRATCH, GROWN)}
            make([run for seed in column.seeds for run in runs_of(column, best, seed)], workshop)
            publish_known(columns, workshop, run_options)
        if arguments.known:
            publish_known(columns, workshop, run_options)


def runs_of(column: Column, best: Mapping[str, Arm], seed: int) -> list[Run]:
    """All runs of a seed."""
    return [run for runs in column.runs(best, seed).values() for run in runs]


def make(runs: Iterable[Run], workshop: Workshop) -> None:
    """Train those that are not known yet."""
    workshop.results(segments(run for run in runs if workshop.result_of(run.name) is None))


def trials_of(
    column: Column, way: str, workshop: Workshop, *, train: bool = True
) -> dict[Arm, list[Result]]:
    """What a search tries, with the result of each seed of the trials.

    Args:
        train: make the runs that are missing.

    Raises:
        UnknownRunError: a run is missing, and is not to be made.
    """
    results_by_arm: dict[Arm, list[Result]] = {}

    def losses_of(choices: Sequence[Choice]) -> list[float]:
        trials = {column.arm(choice): column.trial(way, choice) for choice in choices}
        if train:
            make([run for runs in trials.values() for run in runs], workshop)
        for arm, runs in trials.items():
            results_by_arm[arm] = [known_result(run, workshop) for run in runs]
        return [mean_loss(results_by_arm[arm]) for arm in trials]

    descend(column.dials(way), column.first_choice(way), losses_of, column.trials)
    return results_by_arm


def best_of(trials: Mapping[Arm, Sequence[Result]]) -> Arm:
    """The arm with the lowest mean loss."""
    return min(trials, key=lambda arm: mean_loss(trials[arm]))


def known_result(run: Run, workshop: Workshop) -> Result:
    """Return what a run came to.

    Raises:
        UnknownRunError: it has not been made.
    """
    if (result := workshop.result_of(run.name)) is None:
        raise UnknownRunError(run.name)
    return result


def publish_known(columns: Sequence[Column], workshop: Workshop, run_options: Options) -> None:
    """The cases and tables of columns all of whose trials and seeds are made."""
    case_list, tables = [], []
    for column in columns:
        try:
            trials = {
                way: trials_of(column, way, workshop, train=False) for way in (SCRATCH, GROWN)
            }
            best = {way: best_of(arms) for way, arms in trials.items()}
            seeds = [
                {
                    way: {run: known_result(run, workshop) for run in runs}
                    for way, runs in column.runs(best, seed).items()
                }
                for seed in column.seeds
            ]
        except UnknownRunError:
            continue
        outcome = Outcome(column, trials, seeds)
        case_list += cases(outcome)
        tables.append(table(outcome))
    if case_list:
        publish("growth", case_list, run_options, runs_at_a_time=workshop.workers)
        print("\n\n".join(tables))


def seconds(column: Column, workshop: Workshop, pairs: int) -> list[Case]:
    """Whole runs by the clock, from scratch and grown in turn, of what the trials of a column chose; those from scratch
    are seeds' runs once more, and must come to the same loss."""
    best = {way: best_of(trials_of(column, way, workshop)) for way in (SCRATCH, GROWN)}
    took: dict[str, list[float]] = {SCRATCH: [], GROWN: []}
    flops_by_way: dict[str, float] = {}
    loss_gaps = [0.0]
    share = sum(column.budgets) / len(column.budgets)
    for seed in column.seeds[:pairs]:
        for name, of in ((SCRATCH, 1.0), (GROWN, share)):
            run = Run(best[name], seed, best[name].steps(of * column.flops))
            with tempfile.TemporaryDirectory(dir=workshop.folder) as folder:
                start = time.perf_counter()
                (result,) = (
                    Workshop(Path(folder), workshop.base, 1).results(segments([run])).values()
                )
                took[name].append(time.perf_counter() - start)
            flops_by_way[name] = result.flops
            if (before := workshop.result_of(run.name)) is not None:
                loss_gaps.append(abs(result.loss - before.loss))
    flops = flops_by_way[GROWN] / flops_by_way[SCRATCH]
    clock = [
        grown_time / scratch for grown_time, scratch in zip(took[GROWN], took[SCRATCH], strict=True)
    ]
    return [
        case(f"{column.name}: from scratch", took[SCRATCH], "s"),
        case(f"{column.name}: grown", took[GROWN], "s"),
        case(f"{column.name}: FLOPs, grown / scratch", [flops], "ratio"),
        case(
            f"{column.name}: seconds, grown / scratch", clock, "ratio", most=round(flops + NEAR, 3)
        ),
        case(f"{column.name}: runs made twice differ by, at most", [max(loss_gaps)], "nats"),
    ]


def prepare_data(work: Path, vocabulary: int, quick: bool) -> tuple[str, ...]:
    """Settings of every run; makes the data set."""
    size, held_out = (60_000, 0.1) if quick else (32_000_000, 0.01)
    data = (
        f"data.source={SOURCE}",
        f"data.vocab_size={vocabulary}",
        f"data.max_bytes={size}",
        f"data.val_fraction={held_out}",
        f"data.path={work.absolute() / 'tokens'}",
    )
    config = load_config(None, (*RECIPE, *data)).config
    assert isinstance(config, LanguageConfig)
    prepare_dataset(config.data, config.seed, say=lambda text: print(text, file=sys.stderr))
    return (*RECIPE, *data)


def check_data(columns: Sequence[Column], work: Path) -> None:
    """No run may see a token twice."""
    tokens = len(open_dataset(work / "tokens").split("train"))
    for column in columns:
        for way in (SCRATCH, GROWN):
            arm = column.arm(column.first_choice(way))
            used = arm.steps(column.flops) * arm.shape.batch * arm.shape.context
            if used > tokens:
                sys.exit(f"{column.name}: {tokens:,} tokens of text are fewer than {arm} trains on")


def results_file_of(folder: Path | None, work: Path) -> Path | None:
    """Where the results of all runs on these very data are kept."""
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    data = open_dataset(work / "tokens").fingerprint
    return folder / f"growth-runs-{data[:12]}.json"


if __name__ == "__main__":
    main()
