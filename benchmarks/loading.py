"""How fast samples become tensors, how soon at any place, and in how much memory.

    python benchmarks/loading.py [--quick]

Speed is million tokens per second that come as int64 inputs and targets, 32 × 1024 each, of 200 MB
of random uint16 tokens that lie in the page cache. Beside it stands what a plain copy writes of such
arrays (`numpy.copyto` of 512 MiB, 16 bytes a token), measured in the same process in turns with the
loader; a loader's share of it is taken within a turn. Each round starts every loader in a process of
its own, in random order.

Seeking is timed from opening the data to the first batch, at 90 % of an epoch of 10⁹ samples; the
data is a file of 2 TB made of holes, so that a disk has no part in it. The other loaders seek in an
epoch of 10⁶. A stream of Parquet files with a BPE tokenizer is opened near its end, with seek points
and without. Memory is what a process grows by that reads random batches of 50 GB, again of holes.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import loaders
import seeking
from instar.data.text.streams.seek_points import POINTS_FOLDER
from loaders import Asked
from report import Case, case, options, parser, publish
from sparse import make_sparse

NEEDS = ("datasets", "torchdata", "grain")
FOR_US = "Instar, shuffled"
EACH_ITEM = "DataLoader, memmap by item"
LEAST_SHARE, LEAST_AHEAD = 0.3, 0.5
"""of a plain copy, for samples that are asked for and for those read ahead"""
GB = 10**9


@dataclass(frozen=True)
class Size:
    """How much is read, how often."""

    tokens: int
    batch: int
    context: int
    rounds: int
    turns: int
    """of every loader in a round"""
    seconds: float
    """of a turn"""
    copy_bytes: int
    """with what is copied, more than CPUs keep in their caches"""
    epoch: int
    """samples of the epoch that Instar seeks in"""
    others_epoch: int
    seeks: int
    loaders: tuple[str, ...]
    seekers: tuple[str, ...]
    """that compete with Instar in seeking"""
    stream_documents: int
    """of 200 words"""
    sparse_gb: int
    sparse_batches: int


FULL = Size(
    tokens=100_000_000,
    batch=32,
    context=1024,
    rounds=3,
    turns=3,
    seconds=0.3,
    copy_bytes=1 << 29,
    epoch=10**9,
    others_epoch=10**6,
    seeks=9,
    loaders=tuple(loaders.LOADERS),
    seekers=tuple(seeking.SEEKS),
    stream_documents=10_000,
    sparse_gb=50,
    sparse_batches=2000,
)
QUICK = Size(
    tokens=200_000,
    batch=4,
    context=64,
    rounds=1,
    turns=1,
    seconds=0.01,
    copy_bytes=1 << 20,
    epoch=10**6,
    others_epoch=1000,
    seeks=1,
    loaders=(FOR_US, EACH_ITEM),
    seekers=("grain, by position",),
    stream_documents=200,
    sparse_gb=1,
    sparse_batches=20,
)


def main() -> None:
    words = parser(__doc__)
    words.add_argument(
        "--work", type=Path, help="where the data is made; default: a temporary folder"
    )
    words.add_argument("--rounds", type=int, metavar="N", help=f"default: {FULL.rounds}")
    words.add_argument(
        "--workers",
        type=int,
        default=2,
        metavar="N",
        help="processes that help the other loaders, which are also measured alone; 0: only that; default: 2",
    )
    arguments = words.parse_args()
    run_options = options(arguments)
    size = QUICK if run_options.quick else replace(FULL, rounds=arguments.rounds or FULL.rounds)
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"not installed: {', '.join(missing)}; pip install -c constraints.txt -e '.[bench]'"
        )
    with tempfile.TemporaryDirectory(dir=arguments.work) as place:
        folder = Path(place)
        cases = [
            *speeds(size, folder, arguments.workers),
            *seeks(size, folder),
            *streams(size, folder),
            *memory(size, folder),
        ]
    publish("loading", cases, run_options, libraries=NEEDS)


def speeds(size: Size, folder: Path, workers: int) -> list[Case]:
    """All loaders in their own process, and then with worker processes, if any, those that have them."""
    loaders.make_data(folder, size.tokens, size.context)
    loaders.flat_file(folder)
    instar_names = [name for name in size.loaders if name.startswith("Instar")]
    other_names = [name for name in size.loaders if name not in (*instar_names, loaders.ONE_BATCH)]
    single_process = compete(size, folder, size.loaders, workers=0)
    with_workers = compete(size, folder, other_names, workers) if workers else {}
    copies = [copy_rate for turns in single_process.values() for copy_rate, _ in turns]
    rates = {name: [load_rate for _, load_rate in turns] for name, turns in single_process.items()}
    shares = {
        name: [load_rate / copy_rate for copy_rate, load_rate in turns]
        for name, turns in single_process.items()
    }
    best = max(other_names, key=lambda name: statistics.median(rates[name]))
    title = f"{size.batch}×{size.context}"
    return [
        case(f"{title}: a plain copy of inputs and targets", copies, "Mtok/s"),
        *(case(f"{title}: {name}", rate, "Mtok/s") for name, rate in rates.items()),
        *(
            case(
                f"{title}: {name} / copy",
                shares[name],
                "ratio",
                least=LEAST_AHEAD if "read ahead" in name else LEAST_SHARE,
            )
            for name in instar_names
        ),
        *(case(f"{title}: {name} / copy", shares[name], "ratio") for name in other_names),
        case(
            f"{title}: {FOR_US} / {best}",
            [us / other for us, other in zip(shares[FOR_US], shares[best], strict=True)],
            "ratio",
            above=1.0,
        ),
        *(
            case(
                f"{title}, {workers} worker processes: {name}",
                [load_rate for _, load_rate in turns],
                "Mtok/s",
            )
            for name, turns in with_workers.items()
        ),
    ]


def compete(
    size: Size, folder: Path, names: Sequence[str], workers: int
) -> Mapping[str, list[tuple[float, float]]]:
    """For each turn of each loader: Mtok/s of copying, and of the loader."""
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(size.rounds):
        for name in random.Random(number).sample(names, len(names)):
            request = Asked(
                loader=name,
                folder=str(folder),
                batch=size.batch,
                context=size.context,
                turns=size.turns,
                seconds=size.seconds,
                copy_bytes=size.copy_bytes,
                workers=workers,
            )
            rates[name] += [
                (copy, load) for copy, load in json_output_of(loaders.__file__, request)
            ]
        print(f"round {number + 1} of {size.rounds}, {workers} workers", file=sys.stderr)
    return rates


def seeks(size: Size, folder: Path) -> list[Case]:
    """What coming to 90 % of an epoch takes, of time and of memory."""
    huge, small = folder / "huge", folder / "small"
    make_sparse(huge, size.epoch * size.context + 1)
    make_sparse(small, size.epoch // 1000 * size.context + 1)
    rows = folder / "others"
    loaders.make_data(rows, size.others_epoch * 16 + 1, 16)
    cases = []
    for order in ("shuffled", "sequential", "random"):
        seek, little = (
            seeking.instar_seek(place, order, size.batch, size.context) for place in (huge, small)
        )
        milliseconds = [seeking.milliseconds(seek) for _ in range(size.seeks)]
        more = [seeking.traced_mb(seek) - seeking.traced_mb(little) for _ in range(size.seeks)]
        title = f"{order}: 90 % of an epoch of {size.epoch:,}"
        cases += [
            case(f"{title}: first batch", milliseconds, "ms", most=50),
            case(
                f"{title}: memory, over that of a 1000th",
                [max(0.0, mb) for mb in more],
                "MB",
                most=1,
            ),
        ]
    for name in size.seekers:
        request = Asked(name, str(rows), size.batch, 16, turns=size.seeks, seconds=0, copy_bytes=0)
        milliseconds = json_output_of(seeking.__file__, request)
        title = f"{name}: 90 % of an epoch of {size.others_epoch:,}"
        cases.append(case(f"{title}: first batch", milliseconds, "ms"))
    return cases


def streams(size: Size, folder: Path) -> list[Case]:
    """What coming to the end of a stream takes, with seek points and without."""
    place = folder / "stream"
    data = seeking.make_stream(place, size.stream_documents, words=200)
    seek = seeking.stream_seek(data, place, size.context)
    seconds = [seeking.milliseconds(seek) / 1e3 for _ in range(size.seeks)]
    without = []
    for _ in range(min(3, size.seeks)):
        shutil.rmtree(place / POINTS_FOLDER)
        without.append(seeking.milliseconds(seek) / 1e3)
    title = f"the end of a stream of {size.stream_documents:,} documents"
    return [
        case(f"{title}: first batch, with seek points", seconds, "s"),
        case(f"{title}: first batch, read from its beginning", without, "s"),
    ]


def memory(size: Size, folder: Path) -> list[Case]:
    """What a process holds that reads at random from more than fits into memory."""
    place = folder / "sparse"
    make_sparse(place, size.sparse_gb * GB // 2)
    words = [place, size.sparse_batches, size.batch, size.context]
    script = Path(__file__).with_name("sparse.py")
    growth = json_output_of(str(script), *words)
    title = f"{size.sparse_batches:,} random batches of {size.sparse_gb} GB: growth of"
    return [
        case(f"{title} anonymous memory", [growth["anonymous"]], "MB"),
        case(f"{title} mapped pages", [growth["file"]], "MB"),
        case(f"{title} resident memory", [growth["all"]], "MB", most=200),
    ]


def json_output_of(script: str, *words: object) -> Any:
    """What a script prints as JSON. Raises SystemExit where it fails."""
    texts = [json.dumps(asdict(word)) if isinstance(word, Asked) else str(word) for word in words]
    process = subprocess.run(
        [sys.executable, script, *texts], capture_output=True, text=True, check=False
    )
    if process.returncode:
        sys.exit(f"{Path(script).name} {' '.join(texts)} failed:\n{process.stderr}")
    return json.loads(process.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
