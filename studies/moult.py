"""Compute that `preset: moult` saves on two corpora on which its defaults were not chosen.

    python benchmarks/moult.py [--quick] [--work DIR] [--workers N]

The corpora are the C++ headers that torch ships, without generated ones, and the English manual pages of the
system (Debian's manpages and manpages-dev, and what else is installed), each as 512 BPE tokens, none seen
twice. The final size is a GPT of 12 × 32 that trains on 10 tokens for each of its parameters (besides tables)
with Muon, whose rate is tuned for it with a seed that is not used again. All runs are of the preset: from scratch with
`schedule=[]`, grown without; each decays its rate to zero at its own end. For each seed the loss of the final size is the
target, and the line through the grown runs of several budgets against the logarithm of FLOPs says how much compute they need
for it.

About 40 minutes on one core. With --work a benchmark that was broken off goes on. All runs are in `moult-runs.json`.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from curves import Point, fit_curve, interval
from instar.config.load import load_config
from instar.data.text.prepare import prepare_dataset
from instar.models.shape import count_parameters
from report import Case, case, options, publish
from segments import Result, Segment, Workshop, place_of, study_parser
from study import Shape

MOST = 0.75
"""Of the compute of the final size from scratch, that the preset may need."""
RECIPE = (
    "preset=moult",
    "optimizer.lr=0.005",
    "learning_rate.warmup_iters=50",
    "data.tokenizer=bpe",
    "data.val_fraction=0.03",
    "data.test_fraction=0.0",
    "precision=fp32",
    "device=cpu",
    "eval.eval_interval=1000000",
    "record.log_interval=1000",
    "record.sample_tokens=0",
    "record.report=false",
    "checkpoint.every_minutes=null",
)
SCRATCH = ("schedule=[]",)


@dataclass(frozen=True)
class Corpus:
    """Texts that are on the machine anyway."""

    name: str
    files: Callable[[], Iterator[Path]]
    generated_marks: tuple[str, ...] = ()
    """of which a text that no person wrote has one"""

    def texts(self) -> list[str]:
        """Each text once, in an order of no meaning that is always the same."""
        texts = set()
        for file in filter(Path.is_file, self.files()):
            read = file.read_bytes()
            text = gzip.decompress(read) if file.suffix == ".gz" else read
            texts.add(text.decode("utf-8", errors="replace"))
        originals = sorted(
            text for text in texts if not any(mark in text for mark in self.generated_marks)
        )
        random.Random(0).shuffle(originals)
        return originals


def headers() -> Iterator[Path]:
    return Path(sysconfig.get_path("purelib"), "torch/include").rglob("*.h")


def manuals() -> Iterator[Path]:
    """Those of section 1 are mostly of commands of one vendor."""
    for section in (2, 3, 5, 7, 8):
        yield from Path("/usr/share/man", f"man{section}").glob("*.gz")


CORPORA = (
    Corpus("C++ headers", headers, ("@generated", "_generated_plumbing(", '// {"schema": ')),
    Corpus("manual pages", manuals),
)


@dataclass(frozen=True)
class Effort:
    """What is compared, with how much work."""

    corpora: tuple[Corpus, ...]
    shape: Shape
    tokens_per_parameter: int
    data_bytes: int
    seeds: tuple[int, ...]
    trial_seed: int
    rates: tuple[float, ...]
    """of Muon; doubled or halved further while the best of several is at an end"""
    shorter: float
    """share of the steps, of another budget of the final size, which says what chance does"""
    grown: tuple[float, ...]
    """steps of grown runs, as multiples of those from scratch"""

    @property
    def steps(self) -> int:
        """Of the final size from scratch."""
        parameters = count_parameters(self.shape.architecture(self.shape.layers)).non_embedding
        per_step = self.shape.batch * self.shape.context
        return round(self.tokens_per_parameter * parameters / per_step)


FULL = Effort(
    CORPORA,
    Shape(layers=12, heads=2, width=32, context=64, vocabulary=512, batch=16),
    tokens_per_parameter=10,
    data_bytes=8_000_000,
    seeds=(1, 2, 3),
    trial_seed=100,
    rates=(0.01, 0.02, 0.04),
    shorter=0.7,
    grown=(1.1, 1.35, 1.6),
)
QUICK = replace(
    FULL,
    corpora=CORPORA[:1],  # a small image of Debian has no manual pages
    shape=Shape(layers=4, heads=2, width=16, context=32, vocabulary=300, batch=4),
    tokens_per_parameter=1,
    data_bytes=100_000,
    seeds=(1,),
    rates=(0.02,),
    grown=(1.0, 1.6),
)


@dataclass(frozen=True)
class Comparison:
    """What the runs on a corpus came to."""

    rate: float
    tried: dict[float, float]
    """loss of each rate"""
    scratch: list[list[Result]]
    """of each seed, the shorter and the whole run"""
    grown: list[list[Result]]
    """of each seed, from the shortest to the longest"""


def main() -> None:
    arguments = study_parser(__doc__).parse_args()
    run_options = options(arguments)
    effort = QUICK if run_options.quick else FULL
    comparisons: dict[str, Comparison] = {}
    case_list: list[Case] = []
    with place_of(arguments) as work:
        for corpus in effort.corpora:
            place = work.absolute() / corpus.name.replace(" ", "-")
            place.mkdir(exist_ok=True)
            workshop = Workshop(place, settings(effort, corpus, place), arguments.workers)
            comparisons[corpus.name] = compare(effort, workshop)
            case_list += cases(corpus.name, comparisons[corpus.name])
    publish("moult", case_list, run_options, runs_at_a_time=arguments.workers)
    if run_options.results is not None:
        record = {
            "recipe": RECIPE,
            "effort": asdict(replace(effort, corpora=())),
            "runs": {name: asdict(comparison) for name, comparison in comparisons.items()},
        }
        text = json.dumps(record, indent=1, ensure_ascii=False)
        (run_options.results / "moult-runs.json").write_text(text + "\n", encoding="utf-8")


def settings(effort: Effort, corpus: Corpus, place: Path) -> tuple[str, ...]:
    """Of every run on a corpus; makes the data set."""
    source = place / "text"
    if not source.exists():
        write_texts(corpus, effort.data_bytes, source)
    base = (
        *RECIPE,
        *effort.shape.settings(),
        f"model.n_layer={effort.shape.layers}",
        f"data.source={source}",
        f"data.path={place / 'tokens'}",
    )
    loaded_config = load_config(None, base)
    prepare_dataset(
        loaded_config.config.data,
        loaded_config.config.seed,
        say=lambda text: print(text, file=sys.stderr),
    )
    return base


def write_texts(corpus: Corpus, size: int, folder: Path) -> None:
    """Write texts of `size` bytes in all, each in a file of its own."""
    new_folder = folder.with_name(".text")
    new_folder.mkdir(exist_ok=True)
    for number, text in enumerate(corpus.texts()):
        if size <= 0:
            break
        size -= (new_folder / f"{number:05}.txt").write_bytes(text.encode())
    if size > 0:
        sys.exit(
            f"{corpus.name}: {size:,} bytes are missing here; install what the head of moult.py names"
        )
    new_folder.rename(folder)


def compare(effort: Effort, workshop: Workshop) -> Comparison:
    """The trials of the rate, then the runs of every seed."""
    rate, losses_by_rate = tune_rate(effort, workshop)
    shares = {SCRATCH: (effort.shorter, 1.0), (): effort.grown}
    runs = {
        (arm, seed, share): segment(round(share * effort.steps), rate, seed, arm)
        for seed in effort.seeds
        for arm, every in shares.items()
        for share in every
    }
    results = workshop.results(list(runs.values()))
    scratch, grown_results = (
        [[results[runs[arm, seed, share].name] for share in every] for seed in effort.seeds]
        for arm, every in shares.items()
    )
    return Comparison(rate, losses_by_rate, scratch, grown_results)


def tune_rate(effort: Effort, workshop: Workshop) -> tuple[float, dict[float, float]]:
    """The best rate of the final size from scratch, and the loss of each that was tried."""
    losses: dict[float, float] = {}
    rates = effort.rates
    while rates:
        runs = {rate: segment(effort.steps, rate, effort.trial_seed, SCRATCH) for rate in rates}
        results = workshop.results(list(runs.values()))
        losses |= {rate: results[run.name].loss for rate, run in runs.items()}
        best = min(losses, key=losses.__getitem__)
        further = {min(losses): best / 2, max(losses): best * 2} if len(losses) > 1 else {}
        rates = (further[best],) if best in further else ()
    return best, dict(sorted(losses.items()))


def segment(steps: int, rate: float, seed: int, arm: Sequence[str]) -> Segment:
    """A whole run of the preset."""
    name = f"{'scratch' if arm else 'grown'}-{rate:g}-s{seed}-{steps}"
    return Segment(name, steps, (f"optimizer.muon_lr={rate}", f"seed={seed}", *arm))


def cases(corpus: str, comparison: Comparison) -> list[Case]:
    """Compute to the target of each seed, as a multiple of the final size's, and how sure it is."""
    finals = [runs[-1] for runs in comparison.scratch]
    ratios = [
        needed_compute(runs, final) for runs, final in zip(comparison.grown, finals, strict=True)
    ]
    # each seed's final size for the loss of the next one's: what another seed alone seems to save
    chance_ratios = [
        needed_compute(runs, final)
        for runs, final in zip(comparison.scratch, [*finals[1:], finals[0]], strict=True)
    ]
    between, chance = interval(ratios), interval(chance_ratios)
    name = f"{corpus}: preset moult"
    return [
        case(f"{corpus}: target", [final.loss for final in finals], "nats"),
        case(f"{name}, compute", [between.mean], "ratio", most=MOST),
        case(f"{name}, compute, at least", [between.low], "ratio"),
        case(f"{name}, compute, at most", [between.high], "ratio"),
        case(f"{corpus}: final size with other seeds, at least", [chance.low], "ratio"),
        case(f"{corpus}: final size with other seeds, at most", [chance.high], "ratio"),
    ]


def needed_compute(runs: Sequence[Result], target: Result) -> float:
    """Compute that runs of several budgets need for a loss, as a multiple of what it cost."""
    curve = fit_curve([Point(run.flops, run.loss) for run in runs])
    return min(10.0, curve.flops_at(target.loss) / target.flops)


if __name__ == "__main__":
    main()
