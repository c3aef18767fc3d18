"""Is our loop over graphs as fast as a bare PyTorch Geometric loop, and how much do two ranks keep?

    python benchmarks/graphs.py [--quick] [--repeats N] [--scaled GRAPHS …]

One network, the same graphs in the same order: Instar's trainer in this process, and a bare loop over
PyTorch Geometric's `DataLoader` of graphs in memory, with the same fused AdamW and clipping. They take
turns of some steps each, in random order, on one thread. Efficiency is measured as `scaling.py` does it:
T(2) / (2 · T(1)) in graphs per second, T(1) beside an independent copy.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from instar.config.load import load_config
from instar.data.columns import Ragged
from instar.distributed.rank_log import RankLog
from instar.distributed.signals import StopSignal
from instar.distributed.world import World
from instar.extensions.graphs.config import GraphConfig
from instar.extensions.graphs.task import GraphTask
from instar.record.console import silent_console
from instar.record.recorder import Silent
from instar.record.rundir import RunDir
from instar.run.optimizer import group_parameters
from instar.run.start.build import RunOutputs, build_trainer
from instar.run.start.preflight import Prepared, preflight, prepare_run_data
from instar.run.trainer import Trainer
from report import Case, case, options, parser, publish
from scaling import Size, pace, ratios


@dataclass(frozen=True)
class Trial:
    """How many causal sets, and how long each arrangement trains on them."""

    sets: int
    points: tuple[int, int]
    batch: int
    turn: int
    """steps of one turn"""
    turns: int
    scaling_batches: tuple[int, ...]
    """graphs of a rank's batch in the runs whose scaling is measured"""
    warmup: int
    steps: int
    """of these runs with `batch` graphs; with more of them fewer"""
    repeats: int


FULL = Trial(
    4000,
    (64, 256),
    batch=32,
    turn=8,
    turns=25,
    scaling_batches=(32, 128),
    warmup=10,
    steps=120,
    repeats=7,
)
QUICK = Trial(
    40, (8, 16), batch=4, turn=2, turns=2, scaling_batches=(4,), warmup=2, steps=4, repeats=1
)


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--repeats", type=int, metavar="N", help="of what ranks keep")
    words.add_argument(
        "--scaled",
        type=int,
        action="append",
        metavar="GRAPHS",
        help=f"a rank's batch where scaling is measured; default: {' and '.join(map(str, FULL.scaling_batches))}",
    )
    arguments = words.parse_args()
    run_options = options(arguments)
    trial = QUICK if run_options.quick else FULL
    scaling_batches = tuple(arguments.scaled or trial.scaling_batches)
    trial = replace(
        trial, repeats=arguments.repeats or trial.repeats, scaling_batches=scaling_batches
    )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        base = overrides(trial, Path(folder))
        cases = throughput(trial, base, Path(folder))
        for batch in trial.scaling_batches:
            cases += scaling(trial, batch, base, Path(folder))
    publish("graphs", cases, run_options, threads_per_rank=1)


def overrides(trial: Trial, folder: Path) -> list[str]:
    """The config of every run; its causal sets are made."""
    min_points, max_points = trial.points
    base = [
        "task=graph",
        f"data.path={folder / 'sets'}",
        f"data.causal_sets.sets={trial.sets}",
        f"data.causal_sets.min_points={min_points}",
        f"data.causal_sets.max_points={max_points}",
        "device=cpu",
        f"record.log_interval={trial.warmup}",
        f"train.batch_size={trial.batch}",
        f"train.until=[{trial.warmup + trial.steps}it]",
        "eval.eval_epochs=null",
        "eval.eval_interval=1000000",
        "early_stopping.rules=[]",
        "checkpoint.on_best=false",
        "test.at_end=false",
    ]
    prepare_run_data(load_config(None, base), 1, lambda _: None)
    return base


def throughput(trial: Trial, base: list[str], folder: Path) -> list[Case]:
    """Graphs per second of both loops, and their ratio turn by turn."""
    steps = trial.turn * (trial.turns + 1)
    prepared_run = preflight(load_config(None, [*base, f"train.until=[{steps}it]"]), 1)
    rates: dict[str, list[float]] = {"instar": [], "bare": []}
    with closing(trainer(prepared_run, folder)) as instar_trainer:
        takes: dict[str, Callable[[], None]] = {"instar": instar_trainer.step}
        bare = bare_steps(prepared_run, steps)
        takes["bare"] = lambda: next(bare)
        for name in takes:
            time_steps(takes[name], trial.turn)
        for turn in range(trial.turns):
            for name in random.Random(turn).sample(list(takes), 2):
                rates[name].append(trial.turn * trial.batch / time_steps(takes[name], trial.turn))
    title = f"{trial.batch} graphs of {trial.points[0]} to {trial.points[1]} points"
    return [
        case(f"{title}: Instar", rates["instar"], "graphs/s"),
        case(f"{title}: bare PyTorch Geometric loop", rates["bare"], "graphs/s"),
        case(
            f"{title}: Instar / bare", ratios(rates["instar"], rates["bare"]), "ratio", least=0.98
        ),
    ]


def time_steps(step: Callable[[], None], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        step()
    return time.perf_counter() - start


def trainer(prepared_run: Prepared, folder: Path) -> Trainer:
    run_dir = folder / "run"
    run_dir.mkdir()
    world = World(0, 0, 1, torch.device("cpu"), "none")
    return build_trainer(
        prepared_run,
        world,
        RunOutputs(StopSignal(), Silent(), silent_console(), RankLog(0), RunDir(run_dir)),
    )


def bare_steps(prepared_run: Prepared, steps: int) -> Iterator[None]:
    """What a plain script does with the same network, on the graphs that Instar takes at each step."""
    config = prepared_run.config
    task = prepared_run.spec.task(config)
    assert isinstance(task, GraphTask)
    assert isinstance(config, GraphConfig)
    source, order = task.train_samples()
    batch_size = config.train.batch_size
    epochs = -(-steps * batch_size // order.samples_per_epoch)
    index_batches = [
        order.indices(epoch, begin, min(begin + batch_size, order.samples_per_epoch))
        for epoch in range(epochs)
        for begin in range(0, order.samples_per_epoch, batch_size)
    ][:steps]
    graphs = {
        int(n): graph_of(source.read(np.array([n])))
        for n in np.unique(np.concatenate(index_batches))
    }
    numbers = {n: place for place, n in enumerate(graphs)}
    batches = [[numbers[int(n)] for n in batch] for batch in index_batches]
    loader = DataLoader(list(graphs.values()), batch_sampler=batches)
    model, kind = task.build(), config.optimizer
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.ndim for name, parameter in parameters.items()}
    groups = [
        {"params": [parameters[n] for n in group.names], "weight_decay": group.weight_decay}
        for group in group_parameters(shapes, kind)
    ]
    optimizer = torch.optim.AdamW(groups, lr=kind.lr, betas=(kind.beta1, kind.beta2), fused=True)
    clip = config.train.clip or float("inf")
    heads = [head.outputs for head in config.model.heads]
    for batch in loader:
        outputs = model(batch.x, batch.edge_index.T, batch.ptr)
        loss = loss_of(config, torch.split(outputs, heads, dim=-1), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def loss_of(config: GraphConfig, outputs: tuple[Tensor, ...], batch: Any) -> Tensor:
    """The mean over graphs of the heads' losses, as the task has it."""
    functional = torch.nn.functional
    total = torch.zeros(())
    for head, of_head in zip(config.model.heads, outputs, strict=True):
        target = batch[head.column]
        if head.kind == "classification":
            losses = functional.cross_entropy(of_head, target, ignore_index=-1, reduction="sum")
        else:
            losses = functional.mse_loss(of_head.squeeze(-1), target, reduction="sum")
        total = total + head.weight * losses
    return total / batch.num_graphs


def graph_of(columns: Any) -> Data:
    """One graph as PyTorch Geometric has it."""
    tensors = {}
    for name, column in columns.items():
        array = column.flat if isinstance(column, Ragged) else column
        tensors[name] = torch.from_numpy(np.array(array))
    edges = tensors.pop("edges").reshape(-1, 2)
    x = tensors.pop("x")
    return Data(x=x.reshape(-1, x.shape[-1]), edge_index=edges.T.contiguous(), **tensors)


def scaling(trial: Trial, batch: int, base: list[str], folder: Path) -> list[Case]:
    steps = max(2 * trial.warmup, trial.steps * trial.batch // batch)
    size = Size("graphs", (), batch, 1, trial.warmup, steps, trial.repeats)
    run_overrides = [*base, f"train.batch_size={batch}", f"train.until=[{trial.warmup + steps}it]"]
    arrangements = {"beside": (2, 1), "together": (1, 2)}
    rates: dict[str, list[float]] = {name: [] for name in arrangements}
    for repeat in range(trial.repeats):
        for name in random.Random(repeat).sample(list(arrangements), 2):
            copies, ranks = arrangements[name]
            rates[name].append(pace(size, run_overrides, folder, copies=copies, ranks=ranks).rate)
        efficiency = statistics.median(ratios(rates["together"], rates["beside"], 2))
        print(
            f"{batch} graphs, {repeat + 1} of {trial.repeats}: efficiency {efficiency:.3f}",
            file=sys.stderr,
        )
    title = f"{batch} graphs per rank"
    return [
        case(f"{title}: T(1), beside 1 independent", rates["beside"], "graphs/s"),
        case(f"{title}: T(2)", rates["together"], "graphs/s"),
        case(
            f"{title}: T(2) / 2 T(1), beside",
            ratios(rates["together"], rates["beside"], 2),
            "ratio",
            least=0.95,
        ),
    ]


if __name__ == "__main__":
    main()
