"""A task of the user's own: a plain PyTorch model, and what a run must know of it.

A subclass of `OwnTask` is named in the config, `task: module:class`; all else of a run is as it is
for Instar's own tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.config.roots import own_task
from instar.config.samples import SamplesConfig
from instar.config.schema import Direction, RunConfig
from instar.config.section import Section
from instar.data.columns import Columns
from instar.data.division import SampleSet, divide_samples
from instar.data.order import Order
from instar.data.samples import Samples
from instar.data.source import Source
from instar.models.memory import ALL_TRAIN, Still, state_bytes
from instar.models.shape import Growable, Parameter, count_parameters
from instar.tasks.blueprint import Say
from instar.tasks.samples_blueprint import SamplesBlueprint
from instar.tasks.task import Batch, Tally

M = TypeVar("M", bound=Section)
D = TypeVar("D", bound=SamplesConfig)


class OwnTask(Generic[M, D]):
    """What a run asks of a user's task. `samples`, `module` and `loss` must be given."""

    Model: ClassVar[type[Section]] = Section
    """what the config's section `model` holds"""
    Data: ClassVar[type[SamplesConfig]] = SamplesConfig
    """what its section `data` holds"""
    better: ClassVar[Mapping[str, Direction]] = {}
    """the metrics that `measure` gives beside the loss, and whether more (max) or less (min) of
    them is better"""
    unit: ClassVar[str] = "sample"
    """what a sample is"""

    def __init__(self, model: M, data: D, seed: int) -> None:
        self.model, self.data, self.seed = model, data, seed

    def samples(self) -> Columns | Source:
        """All samples, to be split as the config says: arrays by name, each [samples, …], or
        `Ragged`; or a `Source`. The same in every process."""
        raise NotImplementedError

    def shape(self) -> Growable | None:
        """The shape that the run begins with, whose named axes can grow; None: it never grows."""
        return None

    def module(self, shape: Any) -> nn.Module:
        """A model of this shape. Random values come from torch's generator, which is seeded."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each sample of a batch, [samples]."""
        raise NotImplementedError

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Of each sample the metrics that `better` names, [samples] each."""
        return {}

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """What the model says, by which growth is proved: default, of the batch's first column."""
        said: Tensor = model(next(iter(batch.values())))
        return said

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:  # noqa: ARG002
        """What the final test writes down of each sample, [samples] each."""
        return {}

    def flops(self, shape: Growable) -> int:
        """Forward and backward FLOPs of a sample: default, 6 for each weight of a matrix."""
        return 6 * count_parameters(shape).matmul


NEEDED = ("samples", "module", "loss")
"""What a task must say for itself."""


@dataclass(frozen=True)
class Fixed:
    """The shape of a model that names no axes: every dimension is its own, and nothing can grow."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    def parameters(self) -> dict[str, Parameter]:
        return {
            name: Parameter(
                tuple(f"{name}.{dim}" for dim in range(len(shape))),
                shape,
                "matrix" if len(shape) > 1 else "bias",
            )
            for name, shape in self.tensors
        }

    def sizes(self) -> dict[str, int]:
        return {}

    def resized(self, **sizes: int) -> Fixed:
        raise ValueError(
            f"the task names no axes, so {', '.join(sizes)} cannot grow: give it shape()"
        )

    def to_dict(self) -> dict[str, Any]:
        return {name: list(shape) for name, shape in self.tensors}


@dataclass(frozen=True, eq=False)
class OwnBlueprint(SamplesBlueprint):
    """A user's task with its samples split."""

    own: OwnTask[Any, Any]
    architecture: Growable

    @property
    def unit(self) -> str:
        return self.own.unit

    @property
    def derived(self) -> dict[str, object]:
        return {}

    def units(self, context: int) -> int:
        return self.samples(context)

    def weight(self, context: int) -> int:  # noqa: ARG002
        return 1

    def flops(self, architecture: Any, context: int) -> int:  # noqa: ARG002
        return self.own.flops(architecture)

    def memory(
        self,
        architecture: Any,
        context: int,
        batch_size: int,
        device: str,
        still: Still = ALL_TRAIN,
    ) -> dict[str, int]:
        """Without what the model keeps for its backward pass, which nobody knows."""
        del context, batch_size, device
        return state_bytes(architecture.parameters(), still)

    def style(self, architecture: Any) -> Sequence[tuple[str, Sequence[str]]]:
        sizes = architecture.sizes()
        return [("shape", [", ".join(f"{axis} {size}" for axis, size in sizes.items())])]

    def task(self, config: RunConfig) -> OwnRunTask:
        return OwnRunTask(self.own, self.architecture, self.data, config.seed)


class OwnRunTask:
    """A user's task as the trainer sees it (`tasks/task.py: Task`)."""

    def __init__(
        self, own: OwnTask[Any, Any], architecture: Any, data: SampleSet, seed: int
    ) -> None:
        self.own, self.architecture, self.data, self.seed = own, architecture, data, seed

    @property
    def metrics(self) -> Sequence[str]:
        return ("loss", *self.own.better)

    @property
    def random(self) -> bool:
        """Nobody knows, so generators are seeded for every micro-batch."""
        return True

    def at(self, architecture: Any, context: int) -> OwnRunTask:  # noqa: ARG002
        return OwnRunTask(self.own, architecture, self.data, self.seed)

    def build(self) -> nn.Module:
        return made(self.own, self.architecture, self.seed)

    def shell(self) -> nn.Module:
        return self.build()

    def train_samples(self, course: int = 0) -> tuple[Source, Order]:
        return self.data.train(self.seed + (course << 63))

    def held_out(self, split: str) -> Source:
        return self.data.held_out(split)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._losses(model, batch).float().sum()

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tally]:
        losses = self._losses(model, batch).float()
        ones = torch.ones_like(losses)
        given = {"loss": losses, **self.own.measure(model, batch)}
        missing = [name for name in self.own.better if name not in given]
        if missing:
            raise ValueError(f"{_name(self.own)}.measure gave no {', '.join(missing)}")
        for name in self.own.better:
            self._check_each(f"measure's {name}", given[name], batch)
        return {name: Tally(given[name].float(), ones) for name in self.metrics}

    def predict(self, model: nn.Module, batch: Batch) -> Columns:
        said = self.own.predict(model, batch)
        for name, values in said.items():
            first = values[:, 0] if values.ndim == 2 else values
            self._check_each(f"predict's {name}", first, batch)
        return {name: _numbers(values) for name, values in said.items()}

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.own.outputs(model, batch)

    def flops(self, weight: float) -> float:
        return weight * self.own.flops(self.architecture)

    def describe(self) -> dict[str, Any]:
        return dict(self.architecture.to_dict())

    def fingerprints(self) -> dict[str, str]:
        return {"data": self.data.fingerprint}

    def _losses(self, model: nn.Module, batch: Batch) -> Tensor:
        losses = self.own.loss(model, batch)
        self._check_each("loss", losses, batch)
        return losses

    def _check_each(self, what: str, values: Tensor, batch: Batch) -> None:
        samples = _samples(batch)
        if values.shape != (samples,):
            hint = ": say reduction='none'" if what == "loss" else ""
            raise ValueError(
                f"{_name(self.own)}.{what} must be [samples], one for each of {samples}, not "
                f"{list(values.shape)}{hint}"
            )


@dataclass(frozen=True)
class OwnKind:
    """How blueprints of a user's task are made."""

    name: str

    def prepare(self, loaded: Loaded, world_size: int, say: Say) -> None:
        """Its samples are the user's to make."""

    def blueprint(self, loaded: Loaded, world_size: int) -> OwnBlueprint:  # noqa: ARG002
        """See `Kind`."""
        return self._blueprint(loaded.config)

    def assumed(self, loaded: Loaded, say: Say) -> OwnBlueprint:  # noqa: ARG002
        """See `Kind`."""
        return self._blueprint(loaded.config)

    def _blueprint(self, config: RunConfig) -> OwnBlueprint:
        found = own_task(self.name)
        if not issubclass(found, OwnTask):
            raise _wrong(f"{self.name} is no subclass of OwnTask", "class MyTask(OwnTask): …")
        missing = [n for n in NEEDED if getattr(found, n) is getattr(OwnTask, n)]
        if missing:
            raise _wrong(
                f"{self.name} lacks {', '.join(missing)}", "docs/own-task.md has an example"
            )
        assert isinstance(config.data, SamplesConfig)
        own = found(config.model, config.data, config.seed)
        shape = own.shape() or _fixed(own, config.seed)
        _check_table(own, shape, config.seed)
        data = self._split(own, config.data, config.seed)
        data.held_out("val")
        return OwnBlueprint(data, own, shape)

    def _split(self, own: OwnTask[Any, Any], data: SamplesConfig, seed: int) -> SampleSet:
        given = own.samples()
        try:
            source = Samples(given) if isinstance(given, Mapping) else given
        except ValueError as error:
            raise _wrong(f"{self.name}.samples(): {error}") from None
        classes = None
        if data.stratify is not None:
            if not (
                isinstance(given, Mapping) and isinstance(given.get(data.stratify), np.ndarray)
            ):
                raise ConfigError.one(
                    f"there is no column {data.stratify!r} of classes",
                    where="data.stratify",
                    key="data.stratify",
                )
            classes = np.asarray(given[data.stratify]).astype(np.int64)
        splits = divide_samples(
            len(source), val=data.val, test=data.test, seed=seed, classes=classes
        )
        return SampleSet(source, splits, data)


def made(own: OwnTask[Any, Any], shape: Any, seed: int) -> nn.Module:
    """A model with first values from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return own.module(shape)


def _fixed(own: OwnTask[Any, Any], seed: int) -> Fixed:
    named = made(own, None, seed).named_parameters()
    return Fixed(tuple((name, tuple(parameter.shape)) for name, parameter in named))


def _check_table(own: OwnTask[Any, Any], shape: Growable, seed: int) -> None:
    """Raises ConfigError where the shape and the model differ in a parameter."""
    if isinstance(shape, Fixed):
        return
    there = {n: tuple(p.shape) for n, p in made(own, shape, seed).named_parameters()}
    told = {name: entry.shape for name, entry in shape.parameters().items()}
    if there == told:
        return
    for name in [*there, *told]:
        if there.get(name) != told.get(name):
            raise _wrong(
                f"{_name(own)}: the shape's table says that {name} is "
                f"{_size(told.get(name))}, and in the model it is {_size(there.get(name))}",
                "the table must name every parameter of the module, with the axes it has",
            )


def _numbers(values: Tensor) -> NDArray[Any]:
    """What numpy and Parquet know of: bfloat16 becomes float32."""
    values = values.detach().cpu()
    return (values.float() if values.is_floating_point() else values).numpy()


def _samples(batch: Batch) -> int:
    """How many samples a batch has."""
    name, first = next(iter(batch.items()))
    offsets = batch.get(f"{name}.offsets")
    return len(first) if offsets is None else len(offsets) - 1


def _size(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else "×".join(map(str, shape))


def _name(own: OwnTask[Any, Any]) -> str:
    return type(own).__name__


def _wrong(message: str, hint: str = "") -> ConfigError:
    return ConfigError.one(message, where="task", hint=hint, key="task")
