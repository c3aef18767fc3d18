"""Tasks that are not language, whose runs take a second, and commands that run them.

`Halves`: points in the plane, on which side of a line they are, with labels that are partly wrong, so
that a network soon learns them by heart and its held-out loss turns. `graphs`: small ones, for the
task of Instar's own.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from forks import Forks, forks
from tiny_run import Place
from torch import Tensor, nn

from instar.checkpoint.manifest import CheckpointId, identify
from instar.cli.main import main
from instar.config.load import load_config
from instar.config.schema import ParallelConfig
from instar.custom import Batch, CustomTask, Field, SamplesConfig, Section, Shape, Table
from instar.data.columns import Columns, stack
from instar.data.source import InMemorySource
from instar.distributed.rank_log import RankLog
from instar.distributed.signals import StopSignal
from instar.distributed.world import World, join_group
from instar.record import atomic
from instar.record.console import silent_console
from instar.record.events import Eval, read_events
from instar.record.recorder import Recorder
from instar.record.rundir import RunDir
from instar.run import final_test
from instar.run.output import predictions, save
from instar.run.start.build import RunOutputs, build_trainer
from instar.run.start.preflight import preflight
from instar.run.state.run_state import Decision
from instar.run.state.sync_point import SyncPoint
from instar.run.step.evaluate import Evaluation, EvaluationOptions, evaluate_source
from instar.run.trainer import Trainer
from instar.tasks.task import Measured, Tally
from instar.tasks.user_task import UserTask

CONFIG = """\
name: halves
task: science:Halves
data: {val: 21, test: 23}
train: {until: 60it, batch_size: 8}
optimizer: {lr: 0.03, weight_decay: 0.0}
learning_rate: {shape: constant, warmup_iters: 2}
eval: {eval_epochs: 1, batch_size: 4}
early_stopping: {rules: [{metric: loss, patience: 3}]}
checkpoint: {best_of: [loss, accuracy]}
test: {at_end: true}
record: {log_interval: 1, report: false}
"""
"""A run that learns its samples by heart and gives up; each epoch ends with a partial batch."""

GRAPHS = """\
name: tiny-graphs
task: graph
model:
  width: 8
  n_layer: 1
  heads:
    - {name: side, kind: classification, classes: 2}
    - {name: size, kind: regression}
data: {source: "science:graphs", val: 13, test: 11}
train: {until: 3ep, batch_size: 8}
learning_rate: {warmup_iters: 2}
eval: {batch_size: 4}
record: {log_interval: 1, report: false}
"""


class Data(SamplesConfig):
    samples: int = Field(80, ge=1, description="points")


class Model(Section):
    hidden: int = Field(24, ge=1, description="hidden units")


@dataclass(frozen=True)
class Axes(Shape):
    inputs: int = 2
    hidden: int = 24
    classes: int = 2

    def table(self, table: Table) -> None:
        table.linear("up", "hidden", "inputs")
        table.linear("down", "classes", "hidden")


class NormedAxes(Axes):
    def table(self, table: Table) -> None:
        table.linear("net.up", "hidden", "inputs")
        table.linear("net.down", "classes", "hidden")


class Net(nn.Module):
    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self.up = nn.Linear(axes.inputs, axes.hidden)
        self.down = nn.Linear(axes.hidden, axes.classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.down(torch.relu(self.up(x)))
        return logits


class Halves(CustomTask[Model, Data]):
    Model, Data = Model, Data
    better = {"accuracy": "max", "doubt": "min"}  # noqa: RUF012
    unit = "point"

    def samples(self) -> Columns:
        rng = np.random.default_rng(self.seed)
        x = rng.normal(size=(self.data.samples, 2)).astype(np.float32)
        wrong = rng.random(self.data.samples) < 0.25
        number = np.arange(self.data.samples)
        return {"x": 3 * x, "side": ((x.sum(1) > 0) ^ wrong).astype(np.int64), "number": number}

    def shape(self) -> Axes:
        return Axes(hidden=self.model.hidden)

    def module(self, shape: Any) -> nn.Module:
        return Net(shape)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["side"], reduction="none")

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        chances = model(batch["x"]).softmax(1)
        right = chances.argmax(1) == batch["side"]
        return {"accuracy": right, "doubt": 1 - chances.max(1).values}

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        logits = model(batch["x"])
        return {
            "number": batch["number"],
            "side": batch["side"],
            "side.predicted": logits.argmax(1),
            "chances": logits.softmax(1),
        }


class Unseeded(Halves):
    """Each process draws samples of its own."""

    def samples(self) -> Columns:
        x = np.random.default_rng(os.getpid()).normal(size=(self.data.samples, 2))
        number = np.arange(self.data.samples)
        return {
            "x": x.astype(np.float32),
            "side": (x.sum(1) > 0).astype(np.int64),
            "number": number,
        }


class Normed(Halves):
    """Its model has buffers."""

    def module(self, shape: Any) -> nn.Module:
        return nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(2, affine=False), net=Net(shape)))

    def shape(self) -> Axes:
        return NormedAxes(hidden=self.model.hidden)


class Whole(Halves):
    """Every rank must have all of its model."""

    refuses_shards = "it looks at all rows of a weight"


def graphs() -> Columns:
    """Chains: on which side their nodes are, and how many there are."""
    rng = np.random.default_rng(0)
    samples = []
    for number in range(64):
        nodes, side = int(rng.integers(3, 7)), number % 2
        links = np.stack([np.arange(nodes - 1), np.arange(1, nodes)], 1)
        samples.append(
            {
                "x": rng.normal(2 * side - 1, 1, (nodes, 1)).astype(np.float32),
                "edges": links.astype(np.int64),
                "side": np.int64(side),
                "size": np.float32(nodes / 4),
            }
        )
    return stack(samples)


def place(path: Path, server: Forks | None = None) -> Place:
    """A working directory with both configs in it, and commands typed there."""
    (path / "run.yaml").write_text(CONFIG)
    (path / "graphs.yaml").write_text(GRAPHS)
    return Place(path, server or forks())


Row = tuple[int, dict[str, float]]
"""The step of an evaluation, and its metrics."""


def evaluations(run_dir: Path, split: str = "val") -> list[Row]:
    """What a run recorded of a split."""
    return [
        (event.step, {"loss": event.loss, **event.extra})
        for event in read_events(run_dir / "events.jsonl")
        if isinstance(event, Eval) and event.split == split
    ]


def result(run_dir: Path) -> dict[str, Any]:
    """What the final test wrote down, without how long it took and of which checkpoint it is, which differ
    between equal runs."""
    content: dict[str, Any] = json.loads((run_dir / "test" / "result.json").read_text("utf-8"))
    assert content.pop("seconds") > 0
    assert identify(run_dir / "checkpoints" / content["checkpoint"]["name"]) == CheckpointId(
        **content.pop("checkpoint")
    )
    return content


def pointer_target(run_dir: Path, pointer: str) -> str:
    """The checkpoint that a pointer names."""
    return (run_dir / "checkpoints" / pointer).read_text("utf-8").strip()


def last_step(run_dir: Path, rank: int) -> int:
    """The last step that a rank's log tells of."""
    log = (run_dir / "logs" / f"rank_{rank}.log").read_text("utf-8")
    return int(re.findall(r"step (\d+): loss", log)[-1])


def still_since(values: Sequence[float], *, better: str, delta: float = 0, grace: int = 0) -> int:
    """How many of the last values, after the first `grace`, were no better: written plainly."""
    sign = 1 if better == "max" else -1
    best, since = None, 0
    for place, value in enumerate(values):
        if best is None or sign * (value - best) > delta:
            best, since = value, 0
        elif place >= grace:
            since += 1
    return since


@dataclass(frozen=True)
class Tallied:
    """A task whose samples say themselves what is measured of them, as columns [samples, 2]."""

    metrics: tuple[str, ...] = ("loss", "score")
    cluster: int = 1
    random: bool = False

    def set_metrics(self) -> Mapping[str, object]:
        return {}

    def measure(self, model: nn.Module, batch: Batch, *, predict: bool) -> Measured:
        del model, predict
        return Measured({name: Tally(*batch[name].unbind(1)) for name in self.metrics})

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        del metrics
        return {}


def tally_columns(samples: int, seed: int = 0) -> Columns:
    """Values and weights; a third weighs nothing, and what it says of itself is no number."""
    rng = np.random.default_rng(seed)
    columns = {}
    for number, name in enumerate(Tallied().metrics):
        values = 10.0**number * rng.normal(3, 1, samples)
        weights = rng.choice([0.0, 0.5, 2.0], samples)
        values[weights == 0] = rng.choice([np.nan, np.inf, 7.0])
        columns[name] = np.stack([values, weights], 1).astype(np.float32)
    return columns


def evaluate_columns(world: World, columns: Columns, batch_size: int, unit: int = 1) -> Evaluation:
    """An evaluation of what samples say of themselves."""
    evaluation = evaluate_source(
        Tallied(cluster=unit),  # type: ignore[arg-type]
        nn.Identity(),
        InMemorySource(columns),
        EvaluationOptions(batch_size, seed=0),
        SyncPoint(world, StopSignal()),
    )
    assert evaluation is not None
    return evaluation


def evaluate_all(folder: str, cases: Sequence[tuple[int, int, int]]) -> int:
    """The body of a rank that evaluates so many samples by so many at once, in units of so many."""
    with join_group(ParallelConfig(), "cpu") as world:
        lines = [
            repr(evaluate_columns(world, tally_columns(n), size, unit).metrics)
            for n, size, unit in cases
        ]
        Path(folder, f"w{world.size}-{world.rank}").write_text("\n".join(lines))
    return 0


@contextmanager
def trainer(run_dir: Path, *overrides: str) -> Iterator[Trainer]:
    """`run.yaml` in this process, as the only rank."""
    run_dir.mkdir()
    text = [*overrides, f"record.run_dir={run_dir / 'run'}"]
    loaded_config = load_config(str(run_dir.parent / "run.yaml"), text)
    world = World(0, 0, 1, torch.device("cpu"), "none")
    with closing(Recorder(run_dir / "events.jsonl")) as sink:
        tiny_trainer = build_trainer(
            preflight(loaded_config, 1),
            world,
            RunOutputs(StopSignal(), sink, silent_console(), RankLog(0), RunDir(run_dir)),
        )
        with closing(tiny_trainer):
            yield tiny_trainer


DISK = [(atomic, name) for name in ("write_synced", "sync_file", "rename", "replace_file")]
MOMENTS: Mapping[str, Sequence[tuple[Any, str]]] = {
    "a micro-batch of an evaluation": [(UserTask, "measure")],
    "the decision to stop": [],
    "a piece of the last save": DISK,
    "a pointer to the best": [(save, "update_pointer")],
    "a micro-batch of the test": [(UserTask, "_predictions")],
    "the file of predictions": [(predictions, "_encode")],
    "the file of results": [(final_test, "encode_json")],
}
"""When a signal may come, and the functions that are about to be called then."""


def struck(argv: Sequence[str], moment: str, number: int, ranks: Sequence[int], how: int) -> int:
    """The command line; to some ranks a signal comes as `moment` comes for the `number`-th time."""
    if int(os.environ.get("RANK", "0")) in ranks:
        countdown, decide, save_now = [number], Trainer.decide, save.Saver.save

        def strike() -> None:
            countdown[0] -= 1
            if countdown[0] == 0:
                os.kill(os.getpid(), how)

        def before(function: Callable[..., Any]) -> Callable[..., Any]:
            def strike_first(*arguments: Any, **options: Any) -> Any:
                strike()
                return function(*arguments, **options)

            return strike_first

        def watch() -> None:
            for owner, name in MOMENTS[moment]:
                setattr(owner, name, before(getattr(owner, name)))

        def decide_and_strike(self: Trainer) -> Decision | None:
            decision = decide(self)
            if decision is not None and moment == "the decision to stop":
                strike()
            return decision

        def save_and_watch(
            self: save.Saver, *arguments: Any, must: bool = False, **options: Any
        ) -> None:
            if must and moment == "a piece of the last save":
                self.finish()
                watch()
            save_now(self, *arguments, must=must, **options)

        Trainer.decide = decide_and_strike  # type: ignore[method-assign]
        save.Saver.save = save_and_watch  # type: ignore[method-assign]
        if moment != "a piece of the last save":
            watch()
    return main(argv)
