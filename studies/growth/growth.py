"""Compute that growing saves: grown runs against tuned and fully decayed runs of the final size.

    python studies/growth/growth.py [--quick] [--work DIR] [--workers N] [--only COLUMN …]

Each column of the study is a final size (GPTs of 8 × 32 and 12 × 32; 512 BPE tokens of Python source, none seen twice), an
optimizer and a horizon in tokens per parameter. With a seed that is not used again, its trials choose how
the final size is trained from scratch (rate, length of the decay), the best smaller size that does not grow, and how to
grow: the whole budget for each. Then the other seeds train what was chosen, from scratch and grown, at two budgets
each. Every run has a warm-up, a stable rate and a linear decay to zero at its own end; runs with the same beginning
are branches of one trunk. The line through the grown budgets, loss against the logarithm of FLOPs, gives the FLOPs
at which growing has the loss of the final size of the same seed.

Columns are in the order of their worth, and what is known so far is published after each. With --work a study that was
broken off goes on; what every run came to, trials included, is kept beside the results, so that a published run is
not made again.
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
from columns import Column, Way, column
from instar.config.language import LanguageConfig
from instar.config.load import load_config
from instar.data.text.prepare import prepare_dataset
from instar.data.text.shards import open_dataset
from report import Case, Options, case, options, publish
from segments import Result, Workshop, place_of, study_parser
from study import Arm, Run, Shape, segments
from verdict import Found, cases, table

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
TWICE = ((0.4, 2), (0.7, 2))
WAYS = (
    Way(4, TWICE),
    Way(4, TWICE, rate=0.03),
    Way(4, TWICE, rate=0.04),
    Way(4, TWICE, options="how: interleave"),
    Way(4, ((0.25, 2), (0.5, 2))),
    Way(4, ((0.3, 2), (0.6, 2))),
    Way(4, ((0.5, 2), (0.8, 2))),
    Way(4, ((0.35, 2), (0.7, 2)), rate=0.03, decay=0.3),
    Way(8, ((0.2, 2), (0.45, 2), (0.7, 2))),
    Way(2, ((0.6, 2),)),
    Way(2, ((0.7, 2),)),
    Way(2, ((0.7, 2),), rate=0.03),
    Way(2, ((0.7, 2),), options="how: interleave"),
    Way(2, ((0.8, 2),)),
    Way(2, inserted=0.7),
    Way(4, ((0.5, 4),)),
    Way(4, ((0.5, 4),), decay=0.7),
    Way(4, ((0.6, 4),)),
    Way(4, ((0.6, 4),), decay=0.4),
    Way(4, ((0.6, 4),), options="lr: {rewarm_new: 50}", decay=0.7),
    Way(4, ((0.7, 4),)),
    Way(4, ((0.75, 4),), decay=0.15),
)
"""Tried with Muon at 10 tokens per parameter."""
MUON = (
    (0.02, 0.5),
    (0.03, 0.5),
    (0.02, 0.15),
    (0.02, 0.3),
    (0.02, 0.7),
    (0.01, 0.15),
    (0.01, 0.3),
    (0.04, 0.7),
)
ADAMW = ((0.008, 0.3), (0.008, 0.15), (0.008, 0.5), (0.016, 0.5), (0.004, 0.5))
ADAMW_WAYS = (
    Way(4, TWICE),
    Way(4, TWICE, decay=0.5),
    Way(4, TWICE, rate=0.016, decay=0.5),
    Way(4, ((0.5, 4),)),
    Way(4, ((0.5, 4),), decay=0.5),
    Way(2, ((0.6, 2),), decay=0.5),
)
RAMPED = (
    Way(4, TWICE, context=0.4),
    Way(4, TWICE, rate=0.03, context=0.4),
    Way(4, TWICE, batch=0.4),
)
LONG, LONG_WAYS = MUON[:1] + MUON[3:4], (Way(4, TWICE), Way(4, TWICE, rate=0.03))
SEEDS = (1, 2, 3, 4)
LONGER = (0.7, 0.92)
"""Budgets of growth where it saves less, around the loss of the final size."""
NEAR = 0.05
"""What the share of seconds may be above that of FLOPs."""
COLUMNS = (
    column(
        "Muon, 8 × 32, 10",
        "muon",
        EIGHT,
        10,
        MUON,
        WAYS,
        SEEDS,
        0.65,
        0.8,
        batches=(8,),
        ramped=RAMPED,
    ),
    column("AdamW, 8 × 32, 10", "adamw", EIGHT, 10, ADAMW, ADAMW_WAYS, SEEDS, 0.75),
    column(
        "Muon, 8 × 32, 20",
        "muon",
        EIGHT,
        20,
        LONG,
        LONG_WAYS,
        SEEDS,
        0.75,
        batches=(8, 32),
        ramped=RAMPED[:1],
        together=(Way(4, TWICE, context=0.4, batch=0.4),),
        most_together=0.6,
        budgets=LONGER,
    ),
    column("AdamW, 8 × 32, 20", "adamw", EIGHT, 20, ADAMW[:2], ADAMW_WAYS[:1], SEEDS, 0.75),
    column("Muon, 12 × 32, 10", "muon", TWELVE, 10, LONG, LONG_WAYS, SEEDS, 0.65, 0.8),
    column("Muon, 12 × 32, 20", "muon", TWELVE, 20, LONG, LONG_WAYS, SEEDS, 0.75, budgets=LONGER),
    # 2 layers that do not grow would need more text than there is
    column(
        "Muon, 8 × 32, 60",
        "muon",
        EIGHT,
        60,
        LONG,
        LONG_WAYS,
        SEEDS,
        0.75,
        budgets=LONGER,
        smaller=(2,),
    ),
)
TINY = Shape(layers=4, heads=2, width=16, context=32, vocabulary=300, batch=2)
QUICK = (
    replace(
        column("Muon, 4 × 16, 1", "muon", TINY, 1, MUON[:1], LONG_WAYS[:1], (1,), 0.65, 0.8),
        fixed=(),
    ),
)


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
    parsed = parser.parse_args()
    chosen = options(parsed)
    asked = [
        each
        for each in (QUICK if chosen.quick else COLUMNS)
        if parsed.only is None or each.name in parsed.only
    ]
    with place_of(parsed) as work:
        base = prepared(work, asked[0].shape.vocabulary, chosen.quick)
        check_data(asked, work)
        workshop = Workshop(work, base, parsed.workers, kept_of(chosen.results, work))
        if parsed.seconds is not None:
            publish("growth_seconds", seconds(asked[0], workshop, parsed.seconds), chosen)
            return
        for each in () if parsed.known else asked:
            best = tried(each, workshop)
            seeds = [each.runs(best, seed).values() for seed in each.seeds]
            make([run for parts in seeds for runs in parts for run in runs], workshop)
            publish_known(asked, workshop, chosen)
        publish_known(asked, workshop, chosen)


def make(runs: Iterable[Run], workshop: Workshop) -> None:
    """Train those that are not known yet."""
    workshop.results(segments(run for run in runs if workshop.done(run.name) is None))


def tried(column: Column, workshop: Workshop) -> dict[str, Arm]:
    """Train what is missing of the trials of a column, and decide."""
    make([run for runs in column.trials().values() for run in runs], workshop)
    return decided(column, workshop)


def decided(column: Column, workshop: Workshop) -> dict[str, Arm]:
    """The best arm of each part of the trials."""
    trials = results_of(column.trials(), workshop)
    return {part: min(runs, key=lambda run: runs[run].loss).arm for part, runs in trials.items()}


def results_of(
    wanted: Mapping[str, Sequence[Run]], workshop: Workshop
) -> dict[str, dict[Run, Result]]:
    """What is known of runs."""
    return {
        name: {run: done for run in runs if (done := workshop.done(run.name)) is not None}
        for name, runs in wanted.items()
    }


def publish_known(asked: Sequence[Column], workshop: Workshop, chosen: Options) -> None:
    """The cases and tables of columns of which the trials and a seed are whole."""
    made, tables = [], []
    for each in asked:
        trials = results_of(each.trials(), workshop)
        if any(len(trials[part]) < len(runs) for part, runs in each.trials().items()):
            continue
        best = decided(each, workshop)
        seeds = [results_of(each.runs(best, seed), workshop) for seed in each.seeds]
        whole = [seed for seed in seeds if all(len(runs) == 2 for runs in seed.values())]
        if whole:
            found = Found(each, trials, whole)
            made += cases(found)
            tables.append(table(found))
    if made:
        publish("growth", made, chosen, runs_at_a_time=workshop.workers)
        print("\n\n".join(tables))


def seconds(column: Column, workshop: Workshop, pairs: int) -> list[Case]:
    """Whole runs by the clock, from scratch and grown in turn, of what the trials of a column chose; those from scratch
    are seeds' runs once more, and must come to the same loss."""
    best = tried(column, workshop)
    took: dict[str, list[float]] = {"scratch": [], "grown": []}
    spent: dict[str, float] = {}
    apart = [0.0]
    share = sum(column.budgets) / len(column.budgets)
    for seed in column.seeds[:pairs]:
        for name, of in (("scratch", 1.0), ("grown", share)):
            run = Run(best[name], seed, best[name].steps(of * column.flops))
            with tempfile.TemporaryDirectory(dir=workshop.folder) as folder:
                begun = time.perf_counter()
                (result,) = (
                    Workshop(Path(folder), workshop.base, 1).results(segments([run])).values()
                )
                took[name].append(time.perf_counter() - begun)
            spent[name] = result.flops
            if (before := workshop.done(run.name)) is not None:
                apart.append(abs(result.loss - before.loss))
    flops = spent["grown"] / spent["scratch"]
    clock = [grown / scratch for grown, scratch in zip(took["grown"], took["scratch"], strict=True)]
    return [
        case(f"{column.name}: from scratch", took["scratch"], "s"),
        case(f"{column.name}: grown", took["grown"], "s"),
        case(f"{column.name}: FLOPs, grown / scratch", [flops], "ratio"),
        case(
            f"{column.name}: seconds, grown / scratch", clock, "ratio", most=round(flops + NEAR, 3)
        ),
        case(f"{column.name}: runs made twice differ by, at most", [max(apart)], "nats"),
    ]


def prepared(work: Path, vocabulary: int, quick: bool) -> tuple[str, ...]:
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


def check_data(asked: Sequence[Column], work: Path) -> None:
    """No run may see a token twice."""
    there = len(open_dataset(work / "tokens").split("train"))
    for each in asked:
        for arm in (*each.scratch, *each.fixed, *each.grown):
            used = arm.steps(each.flops) * arm.shape.batch * arm.shape.context
            if used > there:
                sys.exit(f"{each.name}: {there:,} tokens of text are fewer than {arm} trains on")


def kept_of(folder: Path | None, work: Path) -> Path | None:
    """Where the results of all runs on these very data are kept."""
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    data = open_dataset(work / "tokens").fingerprint
    return folder / f"growth-runs-{data[:12]}.json"


if __name__ == "__main__":
    main()
