"""What the record of a run costs: to write a line, to list runs, to read the curves of many.

    python benchmarks/logs.py [--quick] [--work DIR]

Records are made in the writer's format, about 310 bytes for each step, 4 GB in all. Each reading is
a process of its own, timed inside it from the first look at the files. Cold: nothing that reading
leaves behind is there, and no file is in the system's memory. Warm: both are. Kept: what reading
leaves behind is there, but no file is in memory. First look: as cold, but with the columns that a
run writes beside its record.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from instar.config.load import load_config
from instar.logs.read.cache import COLUMNS, extend_columns
from instar.logs.read.reader_cache import cache_folder, cached_summary
from instar.logs.read.record import read_record, read_records
from instar.record.events import Train, read_events
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir, runs_in
from report import Case, case, options, parser, publish

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

STEP = Train(
    step=123456,
    samples=1975296,
    tokens=252837888,
    epoch=0.005821145310339809,
    flops=74490839040.0,
    wall_s=0.9951850699981151,
    active_s=0.974223916997289,
    loss=7.587740474277073,
    grad_norm=1.0280487537384033,
    lr=0.0004,
    tokens_per_s=21710.914813432137,
    mfu=0.45267534866582926,
    data_wait=0.0006436947026846738,
    memory_bytes=605446144,
)


def main() -> None:
    command_line = parser(__doc__)
    command_line.add_argument(
        "--work", type=Path, metavar="DIR", help="where the records are made, and kept"
    )
    arguments = command_line.parse_args()
    run_options = options(arguments)
    quick = run_options.quick
    with tempfile.TemporaryDirectory() as place:
        work = arguments.work or Path(place)
        cases = [
            *writing(work, 200 if quick else 20_000),
            *killing(work, 2 if quick else 30),
            *listing(make_runs(work / "listed", 10 if quick else 1000, 1000), 1 if quick else 5),
            *comparing(
                make_runs(work / "compared", 4 if quick else 100, 200 if quick else 100_000)
            ),
            *one_metric(make_runs(work / "long", 1, 5000 if quick else 10_000_000)),
        ]
    publish("logs", cases, run_options)


def make_runs(folder: Path, runs: int, steps: int) -> Path:
    """A folder of runs, by a process for each core."""
    from concurrent.futures import ProcessPoolExecutor

    from records import make_run

    if not folder.exists():
        with ProcessPoolExecutor() as pool:
            names = [folder / f"made-{number:04}" for number in range(runs)]
            list(pool.map(make_run, names, [steps] * runs, range(runs)))
        config = load_config(None).to_yaml()
        for number, name in enumerate(names):
            (name / "run.yaml").write_text(re.sub("(?m)^seed: .*$", f"seed: {number}", config))
    return folder


def writing(work: Path, count: int) -> list[Case]:
    """One call of the recorder, from an event to bytes that outlive the process."""
    work.mkdir(exist_ok=True)
    microseconds = []
    with Recorder(work / "written.jsonl") as recorder:
        for _ in range(count):
            begin = time.perf_counter()
            recorder.write(STEP)
            microseconds.append(1e6 * (time.perf_counter() - begin))
    (work / "written.jsonl").unlink()
    return [
        case("one log call", microseconds, "µs", most=50),
        case("one log call, 99th percentile", [sorted(microseconds)[count * 99 // 100]], "µs"),
    ]


def killing(work: Path, kills: int) -> list[Case]:
    """Of the calls that had returned when SIGKILL came, how many are in the record."""
    draw, shares, call_count = random.Random(1), [], 0
    for _ in range(kills):
        path = work / "killed.jsonl"
        path.unlink(missing_ok=True)
        writer = subprocess.Popen(
            [sys.executable, __file__, "write", str(path)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        output = os.read(writer.stdout.fileno(), 1)
        time.sleep(draw.uniform(0, 0.2))
        writer.send_signal(signal.SIGKILL)
        output += writer.stdout.read()
        writer.wait()
        record_count = sum(1 for _ in read_events(path))
        shares.append(min(1.0, record_count / len(output)))
        call_count += len(output)
    path.unlink()
    return [
        case("calls that SIGKILL left in the record", [100 * min(shares)], "%", least=100),
        case("calls that had returned by then, all kills together", [float(call_count)], "calls"),
    ]


def write_until_killed(path: Path) -> None:
    with Recorder(path) as recorder:
        while True:
            recorder.write(STEP)
            os.write(1, b".")


def listing(folder: Path, repeats: int) -> list[Case]:
    """What a list says of 1,000 runs of 1,000 steps, and the command that lists them."""
    cold = [time_work("list", folder, forget, evict)["seconds"] for _ in range(repeats)]
    warm = [time_work("list", folder)["seconds"] for _ in range(repeats)]
    seconds = time_command("list", folder, repeats)
    return [
        case("a glance at each of 1,000 runs, cold", cold, "s"),
        case("a glance at each of 1,000 runs, warm", warm, "s"),
        case("instar logs list, 1,000 runs, cold", seconds[True], "s", most=2),
        case("instar logs list, 1,000 runs, warm", seconds[False], "s", most=0.5),
    ]


def time_command(name: str, folder: Path, repeats: int) -> dict[bool, list[float]]:
    """Seconds of `instar logs NAME FOLDER`, cold (true) and warm."""
    command = [sys.executable, "-m", "instar.cli.main", "logs", name, str(folder), "--json"]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeats):
        forget(folder)
        evict(folder)
        for is_cold in (True, False):
            begin = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            seconds[is_cold].append(time.perf_counter() - begin)
    return seconds


def comparing(folder: Path) -> list[Case]:
    """The losses of 100 runs of 100,000 steps, and the command that compares them."""
    cold = time_work("compare", folder, forget, evict)
    warm = [time_work("compare", folder) for _ in range(3)]
    seconds = time_command("compare", folder, 1)
    return [
        case("instar logs compare, 100 runs × 100,000 records, cold", seconds[True], "s", most=15),
        case("instar logs compare, 100 runs × 100,000 records, warm", seconds[False], "s", most=4),
        case("loss of 100 runs × 100,000 records, cold", [cold["seconds"]], "s"),
        case("loss of 100 runs × 100,000 records, warm", column(warm, "seconds"), "s"),
        case("processor time of that, cold, all cores", [cold["cpu_s"]], "s"),
        case("processor time of that, warm, all cores", column(warm, "cpu_s"), "s"),
        case("peak memory of that, cold", [cold["peak_mib"]], "MiB"),
    ]


def one_metric(folder: Path) -> list[Case]:
    """One metric of one run of 10 million steps, with the columns that a run leaves and without."""
    for run in runs_in(folder):
        extend_columns(run)
        extend_columns(run, finished=True)
    first = [time_work("compare", folder, forget, evict) for _ in range(3)]
    for run in runs_in(folder):
        shutil.rmtree(run.path / COLUMNS)
    cold = time_work("compare", folder, forget, evict)
    from_cache = [time_work("compare", folder, evict) for _ in range(3)]
    warm = [time_work("compare", folder) for _ in range(3)]
    return [
        case("loss out of 10 M records, first look", column(first, "seconds"), "s", most=2),
        case("peak memory of that, first look", column(first, "peak_mib"), "MiB", most=2048),
        case("loss out of 10 M records, cold, without columns", [cold["seconds"]], "s"),
        case("loss out of 10 M records, cache kept", column(from_cache, "seconds"), "s", most=2),
        case("loss out of 10 M records, warm", column(warm, "seconds"), "s", most=2),
        case("processor time of that, without columns", [cold["cpu_s"]], "s"),
        case("processor time of that, warm", column(warm, "cpu_s"), "s"),
        case("peak memory of that, without columns", [cold["peak_mib"]], "MiB", most=2048),
        case("peak memory of that, cache kept", column(from_cache, "peak_mib"), "MiB", most=2048),
    ]


def column(measurements: Sequence[dict[str, float]], name: str) -> list[float]:
    return [entry[name] for entry in measurements]


def forget(folder: Path) -> None:
    """Take away what reading left behind."""
    for run in runs_in(folder):
        if (cache := cache_folder(run)) is not None:
            shutil.rmtree(cache, ignore_errors=True)


def evict(folder: Path) -> None:
    """Take files out of the system's memory, as far as it lets go of them."""
    caches = [place for run in runs_in(folder) if (place := cache_folder(run)) is not None]
    for path in (path for place in (folder, *caches) for path in place.rglob("*")):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def time_work(work: str, folder: Path, *before: Callable[[Path], None]) -> dict[str, float]:
    """What a process says that does one of `WORKS`."""
    for prepare in before:
        prepare(folder)
    command = [sys.executable, __file__, work, str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    measurement: dict[str, float] = json.loads(process.stdout)
    return measurement


def read_losses(folder: Path) -> None:
    runs = [RunDir(path) for path in sorted(folder.iterdir())]
    records = read_records(runs) if len(runs) > 1 else [read_record(runs[0])]
    for record in records:
        curve = record.series("loss").current()
        assert len(curve.step) == len(curve.value) > 0


def list_runs(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        assert cached_summary(RunDir(path)).step


WORKS = {"list": list_runs, "compare": read_losses, "write": write_until_killed}


def tell(work: str, folder: Path) -> None:
    """Do it, and say how long it took and how much memory."""
    from order import peak_mb

    begin = time.perf_counter()
    WORKS[work](folder)
    seconds = time.perf_counter() - begin
    busy = sum(os.times()[:4])
    measurement = {"seconds": seconds, "cpu_s": busy, "peak_mib": peak_mb() * 1e6 / 2**20}
    print(json.dumps(measurement))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in WORKS:
        tell(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
