"""What every task is made of: `TaskSpec`, known before torch is imported, and `Task`.

A `TaskSpec` is created from a config without importing torch and gives the shape, the samples, the derived keys and
the cost of a step. It creates the `Task`, all that the trainer knows of a model and its data.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    Self,
    TypeAlias,
    runtime_checkable,
)

from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.config.schema import RunConfig
from instar.extensions import find_task, load_target
from instar.models.cost import NONE_FROZEN, FrozenParameters, state_bytes
from instar.models.shape import Facts, Growable, ModuleFacts, no_facts

if TYPE_CHECKING:
    import torch

    from instar.data.columns import Columns
    from instar.data.order import Order
    from instar.data.sample_set import SampleSet
    from instar.data.source import Source
    from instar.data.text.tokenizer import Tokenizer
    from instar.data.user_sets import StreamedSet

Say = Callable[[str], None]
Tensor: TypeAlias = "torch.Tensor"
Module: TypeAlias = "torch.nn.Module"
"""Types of torch, which tasks import when they build a model."""

SPECS: Mapping[str, str] = {
    "language": "instar.tasks.language:LanguageSpec",
    "causal_lm": "instar.tasks.language:CausalLMSpec",
}
"""`TaskSpec` of each task of the core; its module imports no torch."""
CUSTOM_SPEC = "instar.tasks.user_task:CustomSpec"


def spec_class(task: str) -> type[TaskSpec]:
    """Return the `TaskSpec` of the task that a config names, `module:class` for a custom task."""
    target = SPECS.get(task)
    if target is None:
        names = None if ":" in task else find_task(task)
        target = CUSTOM_SPEC if names is None else names.spec
    spec: type[TaskSpec] = load_target(target)
    return spec


@dataclass(frozen=True)
class SavedModel:
    """The model of a checkpoint, described by its config and manifest, without the run's data."""

    initial_shape: Growable
    """shape of the run at step 0"""
    architecture: Mapping[str, Any]
    """shape of the checkpoint, as JSON values"""
    build: Callable[[Any], Module]
    """builds a module of a shape on the CPU"""
    facts: Facts = no_facts


@dataclass(frozen=True, eq=False)
class TaskSpec(ABC):
    """A task of one config, with its data opened or assumed. Imports no torch."""

    config: RunConfig
    architecture: Any
    """shape of the model at step 0, a `Growable`"""

    task_class: ClassVar[str]
    """its `Task`, as module:class"""
    loss_keys: ClassVar[tuple[str, ...]] = ()
    """keys of the config that define the loss or a metric"""

    @classmethod
    def prepare(cls, loaded_config: Loaded, world_size: int, say: Say) -> None:
        """Prepare the data unless they exist. One process calls this for all ranks.

        Default: no effect; the user prepares them.

        Raises:
            ConfigError: the data cannot be prepared, or exist and contradict the config.
        """
        del loaded_config, world_size, say

    @classmethod
    @abstractmethod
    def open(cls, loaded_config: Loaded, world_size: int) -> Self:
        """Open the prepared data.

        Raises:
            ConfigError: the data and the config contradict each other; lists all contradictions.
        """

    @classmethod
    def assume(cls, loaded_config: Loaded, say: Say, world_size: int = 1) -> Self:
        """`open` without preparing data: `say` reports what is assumed of data that are missing.

        Raises:
            ConfigError: the data are damaged, or their source does not exist.
        """
        del say
        return cls.open(loaded_config, world_size)

    @classmethod
    def section(cls, config: Mapping[str, Any], architecture: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of the section `model` that describe the model of a checkpoint.

        Default: those of its run's config, from which operations may have led away.

        Args:
            config: the run's initial config, by dotted key; may be empty.
            architecture: from the checkpoint's manifest.

        Raises:
            KeyError, TypeError, ValueError: not an architecture of this task, or not one that a run
                could begin with.
        """
        del architecture
        return {k.removeprefix("model."): v for k, v in config.items() if k.startswith("model.")}

    @classmethod
    @abstractmethod
    def saved(cls, config: RunConfig, architecture: Mapping[str, Any]) -> SavedModel:
        """Describe the model of a checkpoint, without opening the data.

        Args:
            architecture: from the checkpoint's manifest.

        Raises:
            KeyError, TypeError, ValueError: not an architecture of this task.
            ConfigError: the user's task cannot be imported or built.
        """

    @property
    @abstractmethod
    def unit(self) -> str:
        """Unit of the loss weight: token, graph, node, sample."""

    @property
    def derived(self) -> Mapping[str, object]:
        """Values of the keys that the config leaves open, by dotted key."""
        return {}

    @property
    def run_files(self) -> Mapping[str, Path]:
        """Files copied into the run's folder, by name: a checkpoint is not usable without them."""
        return {}

    @property
    def warnings(self) -> list[str]:
        """What a run does other than the user's code suggests."""
        return []

    @property
    def refuses_shards(self) -> str:
        """Why the model cannot be divided among ranks; empty: it can."""
        return ""

    @property
    def built(self) -> Sequence[weakref.ref[torch.nn.Parameter]]:
        """Parameters of models that were built and discarded; no later model may have one."""
        return ()

    def facts(self, shape: Any) -> ModuleFacts:
        """Return what only a built module of a shape can tell: frozen parameters, and buffers."""
        return no_facts(shape)

    @abstractmethod
    def train(self, context: int, seed: int) -> tuple[Source, Order]:
        """Return the training samples of this length, and their order."""

    @abstractmethod
    def held_out(self, split: str, context: int) -> Source:
        """Return a split that is never trained on; its samples are read in their own order.

        Raises:
            ConfigError: there is no such split, or it is empty.
        """

    @property
    @abstractmethod
    def fingerprints(self) -> Mapping[str, str]:
        """Fingerprints of the data by name; a run resumes only if they are unchanged."""

    @abstractmethod
    def samples(self, context: int) -> int | None:
        """Return the number of training samples per epoch; None if unknown."""

    def split_sizes(self, context: int) -> dict[str, int | None]:
        """Return the number of samples of each split, None if unknown, without empty ones."""
        sizes = {"train": self.samples(context)}
        for split in ("val", "test"):
            with suppress(ConfigError):
                sizes[split] = len(self.held_out(split, self.config.eval.context or context))
        return sizes

    @property
    def drawing(self) -> str:
        """How training samples are drawn, in words; empty: as `data.order` says."""
        return ""

    def weight(self, context: int) -> float:  # noqa: ARG002
        """Loss weight of a sample; the mean if samples differ."""
        return 1

    def weight_remark(self, context: int) -> str:  # noqa: ARG002
        """What is to be said of `weight`, such as that it is an upper bound; or empty."""
        return ""

    def units(self, context: int) -> int | None:
        """Weight of all training samples (for text: tokens, targets or not); None if unknown."""
        samples = self.samples(context)
        return None if samples is None else round(samples * self.weight(context))

    @abstractmethod
    def flops(self, architecture: Any, context: int) -> int:
        """Forward and backward FLOPs per unit of weight."""

    def computed_units(self, context: int) -> float:
        """Units of a sample that the model computes, whether the loss counts them or not; the mean if samples
        differ. Default: its weight."""
        return self.weight(context)

    @property
    def flops_remark(self) -> str:
        """Why `flops` says nothing of how long a step takes; empty: it does."""
        return ""

    def memory(
        self,
        architecture: Any,
        context: int,
        batch_size: int,
        device: str,
        frozen_parameters: FrozenParameters = NONE_FROZEN,
    ) -> dict[str, int]:
        """Peak memory of a step on one rank, in bytes per part.

        Default: without activations, whose size depends on the samples.

        Args:
            frozen_parameters: which are not trained.
        """
        del context, batch_size, device
        optimizer, ema = self.config.optimizer, self.config.train.ema is not None
        return state_bytes(
            architecture.parameters(), frozen_parameters, optimizer=optimizer, ema=ema
        )

    def fp32_reason(self, device: str) -> str:
        """Return why `precision: auto` is fp32 on a kind of device, `cpu` or `cuda`; empty where bf16 may be
        faster and trains equally well. Default: never bf16."""
        del device
        return f"task {self.config.task} trains in fp32 unless the config says otherwise"

    def style(self, architecture: Any) -> Sequence[tuple[str, Sequence[str]]]:
        """Describe a shape in words: pairs of a label and its lines. Default: its axes."""
        sizes = architecture.sizes()
        return [("shape", [", ".join(f"{axis} {size}" for axis, size in sizes.items())])]

    def task(self, config: RunConfig) -> Task:
        """Create the task for a config without open keys. Imports torch."""
        task: Task = load_target(self.task_class)(self, config, self.architecture, config.context)
        return task


@dataclass(frozen=True, eq=False)
class SampleSetSpec(TaskSpec):
    """A `TaskSpec` whose samples are one data set of no particular length, split by the config."""

    data: SampleSet | StreamedSet

    def train(self, context: int, seed: int) -> tuple[Source, Order]:  # noqa: ARG002
        return self.data.train(seed)

    def held_out(self, split: str, context: int) -> Source:  # noqa: ARG002
        return self.data.held_out(split)

    @property
    def fingerprints(self) -> dict[str, str]:
        return {"data": self.data.fingerprint}

    def samples(self, context: int) -> int | None:  # noqa: ARG002
        return self.data.size("train")

    @property
    def drawing(self) -> str:
        return self.data.drawing


Batch = Mapping[str, "torch.Tensor"]
"""Columns of samples as tensors on the device, by name. A ragged column is its concatenated values,
with `<name>.offsets`, int64 [samples + 1], starting at 0."""


class Tally(NamedTuple):
    """Per-sample values of a metric, whose mean is Σ values / Σ weights, added up in float64.

    Both tensors are [samples], of any type, on any device. Samples of weight 0 are ignored.
    """

    values: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Measured:
    """What a task measures of a held-out batch, in one forward pass."""

    tallies: Mapping[str, Tally]
    """metrics that are means over samples, including `loss`"""
    inputs: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    """arguments of each metric of `Task.set_metrics`"""
    predictions: Columns = field(default_factory=dict)
    """columns that a test saves: targets and predictions per sample"""


@dataclass(frozen=True, eq=False)
class Task(ABC):
    """A model of one architecture, its samples, loss and metrics."""

    spec: TaskSpec
    config: RunConfig
    """the run's, without open keys"""
    architecture: Any
    """shape of the model, which growth changes"""
    context: int
    """length of a sample; 1 if samples have none"""

    def at(self, architecture: Any, context: int) -> Self:
        """Return the same task with another model shape or sample length."""
        return replace(self, architecture=architecture, context=context)

    @property
    def metrics(self) -> Sequence[str]:
        """Names of all metrics, including `loss`."""
        return tuple(self.config.metrics)

    def start_warnings(self, model: Module) -> Sequence[str]:
        """Return what is said once when a run starts, of what only its device tells. Called in the autocast context of
        forward passes. Default: nothing."""
        del model
        return ()

    @property
    def cluster(self) -> int:
        """Number of consecutive held-out samples that are one unit of the standard error; 1 if
        samples are independent."""
        return 1

    @property
    @abstractmethod
    def random(self) -> bool:
        """Whether the model draws random numbers in training, e.g. for dropout."""

    def train_samples(self, course: int = 0) -> tuple[Source, Order]:
        """Return the training samples and their order.

        Args:
            course: number of changes of the sample length so far; each has a new order.
        """
        # seeds are below 2^63, so no two courses of any two runs share an order
        return self.spec.train(self.context, self.config.seed + (course << 63))

    def held_out(self, split: str) -> Source:
        """See `TaskSpec`."""
        return self.spec.held_out(split, self.held_out_context)

    @property
    def held_out_sets(self) -> Mapping[str, int | None]:
        """Return the steps between evaluations of each further held-out split, None: each one of the run."""
        return {}

    def held_out_parts(self) -> Mapping[str, range]:
        """Return the samples of `held_out("val")` that are of each source, whose loss is told by its name."""
        return {}

    @property
    def held_out_context(self) -> int:
        """Length of a held-out sample."""
        return self.config.eval.context or self.context

    def build(self) -> Module:
        """Build the model of step 0 on the CPU, initialised from the run's seed alone."""
        return self.shell()

    @abstractmethod
    def shell(self) -> Module:
        """Build a model whose parameters may have any values, on torch's default device: the CPU, or
        the meta device if the task has `initial_values`."""

    def initial_values(self) -> Mapping[str, Tensor] | None:
        """Return the parameters' values at step 0, each made when it is asked for; None: only `build`
        can make them.

        With these, no process needs memory for a whole model that is sharded: `shell` is called on
        the meta device, and buffers are then computed by the module's `reset_buffers`, if it has any.
        """
        return None

    @abstractmethod
    def loss_sum(self, model: Module, batch: Batch) -> Tensor:
        """Return the loss summed over the batch, a scalar in float32 or float64.

        The mean is the sum divided by `Source.weights`.
        """

    def hooks(self) -> Sequence[object]:
        """Return the task's own hooks; see `instar.run.step.hooks`."""
        return ()

    def set_metrics(self) -> Mapping[str, object]:
        """Return new metrics of a whole evaluation set by name; see `instar.tasks.metrics`."""
        return {}

    def derived(self, metrics: Mapping[str, float]) -> Mapping[str, float]:  # noqa: ARG002
        """Return further numbers that follow from the values of all metrics, by name."""
        return {}

    def optimizer(self, model: Module) -> Any:  # noqa: ARG002
        """Return optimizers or parameter groups for a model; None: those of the config."""
        return None

    def lr_share(self, step: int, end: int | None) -> float | None:  # noqa: ARG002
        """Return the share of the peak learning rate at a step of the schedule, which ends at step
        `end`; None: as the config's section `learning_rate` says."""
        return None

    @abstractmethod
    def measure(self, model: Module, batch: Batch, *, predict: bool = False) -> Measured:
        """Measure a batch: the loss and all other metrics. Called without gradients.

        Args:
            predict: also return predictions.
        """

    @abstractmethod
    def outputs(self, model: Module, batch: Batch) -> Tensor:
        """Return the model's outputs before the loss: the function that growth preserves."""

    def loss_and_outputs(self, model: Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return `loss_sum` and `outputs`. Called without gradients.

        Default: two forward passes.
        """
        return self.loss_sum(model, batch), self.outputs(model, batch)

    def flops(self, weight: float) -> float:
        """Forward and backward FLOPs for samples of this total weight."""
        return weight * self._flops_per_weight

    @cached_property
    def _flops_per_weight(self) -> int:
        # counting a table of parameters takes as long as a small model's update
        return self.spec.flops(self.architecture, self.context)


@runtime_checkable
class GeneratesText(Protocol):
    """A task whose model generates text from a prompt."""

    def sample_text(self, model: Module, tokenizer: Tokenizer, prompt: str, tokens: int) -> str:
        """Generate `tokens` tokens after the prompt; deterministic for the same weights.

        Raises:
            FloatingPointError: the model's outputs are not finite.
        """
        ...
