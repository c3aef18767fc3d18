"""Protocols of a task: `TaskFactory`, `TaskSpec` and `Task`.

A `TaskSpec` is created from a config without importing torch and gives the shape, the samples, the
derived keys and the cost of a step. It creates the `Task`, all that the trainer knows of a model
and its data.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.config.schema import RunConfig, SamplesConfig
from instar.models.architecture import NONE_FROZEN, FrozenParameters
from instar.models.shape import Facts, Growable, no_facts

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from instar.data.columns import Columns
    from instar.data.order import Order
    from instar.data.source import Source
    from instar.data.split import SampleSet
    from instar.data.text.tokenizer import Tokenizer

Say = Callable[[str], None]

FACTORIES: Mapping[str, str] = {
    "language": "instar.tasks.language",
    "graph": "instar.tasks.graph_spec",
}
"""Module of each built-in task, which is its `TaskFactory` and imports no torch."""


class TaskSpec(Protocol):
    """A task of one config, with its data opened or assumed."""

    @property
    def architecture(self) -> Growable:
        """Shape of the model at step 0."""
        ...

    @property
    def unit(self) -> str:
        """Unit of the loss weight: token, graph, node, sample."""
        ...

    @property
    def derived(self) -> Mapping[str, object]:
        """Values of the keys that the config leaves open, by dotted key."""
        ...

    @property
    def kept(self) -> Mapping[str, Path]:
        """Files copied into the run's folder, by name: a checkpoint is not usable without them."""
        ...

    def check_test(self) -> None:
        """Check that there is a test split.

        Raises:
            ConfigError: there are no samples to test on.
        """
        ...

    def samples(self, context: int) -> int | None:
        """Number of training samples per epoch; None if unknown."""
        ...

    def units(self, context: int) -> int | None:
        """Weight of all training samples (for text: tokens, targets or not); None if unknown."""
        ...

    def weight(self, context: int) -> int:
        """Loss weight of a sample; the mean if samples differ."""
        ...

    def flops(self, architecture: Any, context: int) -> int:
        """Forward and backward FLOPs per unit of weight."""
        ...

    def memory(
        self,
        architecture: Any,
        context: int,
        batch_size: int,
        device: str,
        still: FrozenParameters = NONE_FROZEN,
    ) -> dict[str, int]:
        """Peak memory of a step on one rank, in bytes per part; empty if unknown.

        Args:
            still: frozen parameters.
        """
        ...

    def style(self, architecture: Any) -> Sequence[tuple[str, Sequence[str]]]:
        """Describe a shape in words: pairs of a label and its lines."""
        ...

    def task(self, config: RunConfig) -> Task:
        """Create the task for a config without open keys. Imports torch."""
        ...


@dataclass(frozen=True)
class SavedModel:
    """The model of a checkpoint, described by its config and manifest, without the run's data."""

    begun: Growable
    """shape of the run at step 0"""
    architecture: Mapping[str, Any]
    """shape of the checkpoint, as JSON values"""
    build: Callable[[Any], torch.nn.Module]
    """builds a module of a shape on the CPU"""
    facts: Facts = no_facts


class TaskFactory(Protocol):
    """Creates the specs of one kind of task: a module of `instar.tasks`, or a user's class."""

    def prepare(self, loaded: Loaded, world_size: int, say: Say) -> None:
        """Prepare the data unless they exist. One process calls this for all ranks.

        Raises:
            ConfigError: the data cannot be prepared, or exist and contradict the config.
        """
        ...

    def spec(self, loaded: Loaded, world_size: int) -> TaskSpec:
        """Open the prepared data.

        Raises:
            ConfigError: the data and the config contradict each other; lists all contradictions.
        """
        ...

    def assumed_spec(self, loaded: Loaded, say: Say, world_size: int = 1) -> TaskSpec:
        """`spec` without preparing data: `say` reports what is assumed of data that are missing.

        Raises:
            ConfigError: the data are damaged, or their source does not exist.
        """
        ...

    def saved(self, config: RunConfig, architecture: Mapping[str, Any]) -> SavedModel:
        """Describe the model of a checkpoint, without opening the data.

        Args:
            architecture: from the checkpoint's manifest.

        Raises:
            KeyError, TypeError, ValueError: not an architecture of this task.
            ConfigError: the user's task cannot be imported or built.
        """
        ...


def task_factory(task: str) -> TaskFactory:
    """Return the factory of the task that a config names.

    Raises:
        ConfigError: no task has this name.
    """
    if task in FACTORIES:
        found: Any = importlib.import_module(FACTORIES[task])
    else:
        found = importlib.import_module("instar.tasks.custom").CustomTaskFactory(task)
    factory: TaskFactory = found
    return factory


@dataclass(frozen=True, eq=False)
class SampleSetSpec:
    """Base of a `TaskSpec` whose samples are one data set, split by the config."""

    data: SampleSet

    @property
    def kept(self) -> dict[str, Path]:
        return {}

    def check_test(self) -> None:
        self.data.held_out("test")

    def samples(self, context: int) -> int:  # noqa: ARG002
        return self.data.splits["train"].size


def split_samples(source: Source, data: SamplesConfig, seed: int) -> dict[str, NDArray[np.int64]]:
    """Split the samples as the config's section `data` says.

    Returns:
        the sample numbers of each split, by name.

    Raises:
        ConfigError: the split is impossible, or there is no column `data.stratify` of classes.
    """
    import numpy as np

    from instar.data.arrays import Arrays, InMemorySource
    from instar.data.split import divide_samples

    classes = None
    if (name := data.stratify) is not None:
        columns = source.columns if isinstance(source, InMemorySource) else {}
        if isinstance(source, Arrays):
            classes = np.asarray(source.column(name))
        elif not columns and len(source):
            columns = source.read(np.arange(len(source)))
        found = columns.get(name) if classes is None else classes
        if not isinstance(found, np.ndarray):
            raise ConfigError.one(
                f"there is no column {name!r} of classes",
                where="data.stratify",
                hint=f"there are {', '.join(columns)}",
                key="data.stratify",
            )
        classes = found.astype(np.int64)
    return dict(
        divide_samples(len(source), val=data.val, test=data.test, seed=seed, classes=classes)
    )


class SampleSetTask:
    """Base of a `Task` whose samples are one data set, split by the config."""

    unit = 1

    def __init__(self, data: SampleSet, seed: int) -> None:
        """
        Args:
            seed: the run's seed, which orders the samples.
        """
        self.data, self.seed = data, seed

    def train_samples(self, course: int = 0) -> tuple[Source, Order]:
        # seeds are below 2^63, so no two courses of any two runs share an order
        return self.data.train(self.seed + (course << 63))

    def held_out(self, split: str) -> Source:
        return self.data.held_out(split)

    def fingerprints(self) -> dict[str, str]:
        return {"data": self.data.fingerprint}


Batch = Mapping[str, "torch.Tensor"]
"""Columns of samples as tensors on the device, by name. A ragged column is its concatenated values,
with `<name>.offsets`, int64 [samples + 1], starting at 0."""


class Tally(NamedTuple):
    """Per-sample values of a metric, whose mean is Σ values / Σ weights.

    Both tensors are [samples], on any device. Samples of weight 0 are ignored.
    """

    values: torch.Tensor
    weights: torch.Tensor


class Task(Protocol):
    """A model of one architecture, its samples, loss and metrics."""

    @property
    def architecture(self) -> Any:
        """Shape of the model, which growth changes."""
        ...

    @property
    def metrics(self) -> Sequence[str]:
        """Names of all metrics that `measure` returns, including `loss`."""
        ...

    @property
    def unit(self) -> int:
        """Number of consecutive held-out samples per unit of the standard error; 1 if samples are
        independent."""
        ...

    @property
    def random(self) -> bool:
        """Whether the model draws random numbers in training, e.g. for dropout."""
        ...

    def at(self, architecture: Any, context: int) -> Self:
        """Return the same task with another model shape or sample length."""
        ...

    def build(self) -> torch.nn.Module:
        """Build the model of step 0 on the CPU, initialised from the run's seed alone."""
        ...

    def shell(self) -> torch.nn.Module:
        """Build a model on the CPU whose parameters may have any values."""
        ...

    def train_samples(self, course: int = 0) -> tuple[Source, Order]:
        """Return the training samples and their order.

        Args:
            course: number of changes of the sample length so far; each has a new order.
        """
        ...

    def held_out(self, split: str) -> Source:
        """Return a split that is never trained on; its samples are read in their own order."""
        ...

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss summed over the batch, a float32 scalar.

        The mean is the sum divided by `Source.weights`.
        """
        ...

    def measure(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, Tally]:
        """Return every metric of the batch by name, including `loss`. Called without gradients."""
        ...

    def predict(self, model: torch.nn.Module, batch: Batch) -> Columns:
        """Return the columns that a test saves: targets and predictions per sample, or nothing."""
        ...

    def outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the model's outputs before the loss: the function that growth preserves."""
        ...

    def flops(self, weight: float) -> float:
        """Forward and backward FLOPs for samples of this total weight."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Return the current architecture as JSON."""
        ...

    def fingerprints(self) -> Mapping[str, str]:
        """Return fingerprints of the data by name; a run resumes only if they are unchanged."""
        ...


@runtime_checkable
class GeneratesText(Protocol):
    """A task whose model generates text from a prompt."""

    def sample_text(
        self, model: torch.nn.Module, tokenizer: Tokenizer, prompt: str, tokens: int
    ) -> str:
        """Generate `tokens` tokens after the prompt; deterministic for the same weights.

        Raises:
            FloatingPointError: the model's outputs are not finite.
        """
        ...
