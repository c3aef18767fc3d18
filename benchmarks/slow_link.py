"""Seconds to equal loss on two hosts with a slow link: local steps (DiLoCo) against DDP, and against one host.

    python benchmarks/slow_link.py [--quick] [--seeds 3] [--delay 0.025]

Hosts are network namespaces with one rank and one thread each, joined by a link that brings every packet
`delay` seconds later, in either direction. Everybody trains the same 2 × 64 GPT of context 64 on 1 MB of
the Python standard library's source in characters, with 32 samples in a global batch, and evaluates every
100 steps on the same part of the validation set. DDP makes 600 steps, on two hosts and on one; DiLoCo makes
more, because its steps are less good, with a rate and an outer optimizer of its own. The target of a seed
is what DDP reaches at its end, and 0.015 on top, as in time_to_loss.py. Seconds are those since the ranks
have met. Contenders take turns, in an order that turns with every seed. Needs root and iproute2.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from instar.record.events import Eval, RunFinished, read_events
from report import Case, case, options, parser, publish
from time_to_loss import CHANCE, text_for

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from two_hosts import Host, Wire, two_hosts

LIMIT_S = 900.0
PYTHON = os.environ.get("PYTHON", sys.executable)
"""the interpreter of the ranks"""
PORT = "29781"
MODEL = (
    *("preset=plain", "precision=fp32", "device=cpu"),
    *("model.n_layer=2", "model.n_head=2", "model.n_embd=64", "model.context=64"),
    *(
        "train.batch_size=16",
        "train.gradient_accumulation_steps=2",
        "learning_rate.warmup_iters=50",
    ),
    *("eval.at_start=false", "eval.batch_size=64", "eval.eval_iters=40"),
    *("record.log_interval=200", "record.report=false", "checkpoint.on_best=false"),
)


@dataclass(frozen=True)
class Contender:
    """Somebody who trains on one host or on two."""

    name: str
    hosts: int
    steps: int
    settings: tuple[str, ...]


LOCAL = (
    *("parallel.strategy=diloco", "parallel.diloco.sync_every=50"),
    *("parallel.diloco.outer_lr=0.7", "parallel.diloco.outer_momentum=0.5"),
)
DDP = Contender("DDP", 2, 600, ("optimizer.lr=1e-2",))
DILOCO = Contender("DiLoCo", 2, 800, ("optimizer.lr=8e-3", *LOCAL))
ALONE = Contender("one host", 1, 600, DDP.settings)
CONTENDERS = (DDP, DILOCO, ALONE)
BAR = 0.25


@dataclass(frozen=True)
class Reached:
    """Evaluations of a run: seconds since its ranks have met, and the loss."""

    evaluations: tuple[tuple[float, float], ...]
    seconds_per_step: float

    def seconds_to(self, target: float) -> float | None:
        """When the loss was first at or below the target."""
        return next((at for at, loss in self.evaluations if loss <= target), None)


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--seeds", type=int, help="default: 3")
    words.add_argument("--delay", type=float, default=0.025, help="seconds; default: 0.025")
    arguments = words.parse_args()
    run_options = options(arguments)
    contenders = CONTENDERS
    if run_options.quick:
        contenders = tuple(replace(contender, steps=4) for contender in CONTENDERS)
    seeds = range(1, (arguments.seeds or (1 if run_options.quick else 3)) + 1)
    delay_s = 0.001 if run_options.quick else arguments.delay
    results: dict[str, list[Reached]] = {contender.name: [] for contender in contenders}
    with tempfile.TemporaryDirectory() as folder:
        data = text_for(Path(folder), 60_000 if run_options.quick else 1_000_000)
        for seed in seeds:
            turn = seed % len(contenders)
            for contender in (*contenders[turn:], *contenders[:turn]):
                result = run(contender, seed, data, delay_s, Path(folder), quick=run_options.quick)
                results[contender.name].append(result)
                at, loss = result.evaluations[-1]
                print(
                    f"seed {seed}: {contender.name}: {loss:.4f} after {at:.1f} s", file=sys.stderr
                )
    title = f"{round(1000 * delay_s)} ms each way"
    publish("slow_link", cases(title, results), run_options, threads_per_rank=1, delay_s=delay_s)


def run(
    contender: Contender,
    seed: int,
    data: Sequence[str],
    delay_s: float,
    folder: Path,
    *,
    quick: bool,
) -> Reached:
    """One run, from its start to its end."""
    place = folder / f"{contender.name}-{seed}".replace(" ", "-")
    place.mkdir()
    settings = (
        *MODEL,
        *contender.settings,
        *data,
        f"seed={seed}",
        f"train.until=[{contender.steps}it]",
        f"eval.eval_interval={2 if quick else 100}",
        f"record.run_dir={place / 'run'}",
    )
    if quick:
        settings = (*settings, "model.n_layer=1", "eval.eval_iters=1")
    words = [word for text in settings for word in ("--set", text)]
    with two_hosts(Wire(delay_s)) as host_pair:
        hosts = host_pair[: contender.hosts]
        processes = [
            host.start([PYTHON, "-m", "instar.train", *words], place, rank_of(number, hosts))
            for number, host in enumerate(hosts)
        ]
        for process in processes:
            if process.finish(LIMIT_S):
                sys.exit(f"{contender.name} failed:\n{process.output()}")
    events = [*read_events(place / "run" / "events.jsonl")]
    (end,) = (event for event in events if isinstance(event, RunFinished))
    return Reached(
        tuple((event.wall_s, event.loss) for event in events if isinstance(event, Eval)),
        end.active_s / end.step,
    )


def rank_of(number: int, hosts: Sequence[Host]) -> dict[str, str]:
    """What a launcher tells the only rank of a host."""
    if len(hosts) == 1:
        return {}
    return {
        **{"WORLD_SIZE": str(len(hosts)), "RANK": str(number)},
        **{"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        **{"MASTER_ADDR": hosts[0].address, "MASTER_PORT": PORT},
    }


def cases(title: str, results: Mapping[str, Sequence[Reached]]) -> list[Case]:
    """Losses, seconds to the target, and their ratios, seed by seed."""
    targets = [result.evaluations[-1][1] + CHANCE for result in results[DDP.name]]
    seconds: dict[str, list[float]] = {}
    case_list: list[Case] = []
    for name, runs in results.items():
        finals = [result.evaluations[-1][1] for result in runs]
        times = [result.seconds_to(target) for result, target in zip(runs, targets, strict=True)]
        case_list.append(case(f"{title}: final validation loss, {name}", finals, "nats"))
        per_step = [1000 * result.seconds_per_step for result in runs]
        case_list.append(case(f"{title}: time of a step, {name}", per_step, "ms"))
        if None in times:
            excess = [max(0.0, loss - target) for loss, target in zip(finals, targets, strict=True)]
            case_list.append(
                case(f"{title}: final loss above the target, {name}", excess, "nats", most=0)
            )
        ends = [result.evaluations[-1][0] for result in runs]
        seconds[name] = [at or end for at, end in zip(times, ends, strict=True)]
        case_list.append(case(f"{title}: time to target, {name}", seconds[name], "s"))
    for name, bar in ((DDP.name, BAR), (ALONE.name, None)):
        ratios = [a / b for a, b in zip(seconds[DILOCO.name], seconds[name], strict=True)]
        case_list.append(
            case(f"{title}: time to target, DiLoCo / {name}", ratios, "ratio", most=bar)
        )
    return case_list


if __name__ == "__main__":
    main()
