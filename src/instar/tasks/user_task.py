"""Custom tasks: makes the user's object, its samples and its model, calls it, and checks what it gives."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from instar.config.errors import ConfigError, InstarError
from instar.config.fields import custom_task_class
from instar.config.load import Loaded
from instar.config.schema import RunConfig, SamplesConfig
from instar.config.sections import Section
from instar.config.user_code.failures import what_happened
from instar.data.columns import Columns
from instar.data.sample_set import SampleSet
from instar.data.torch_loader import unused_settings
from instar.data.user_sets import StreamedSet, sample_set
from instar.distributed.failure import exits_fail
from instar.models.loss import at_least_float32
from instar.models.module import check_trainable, persistent_buffers
from instar.models.shape import Fixed, Growable, ModuleFacts
from instar.models.table import Shape, check_shape_buffers, check_table
from instar.tasks.custom import NEEDED, CustomTask
from instar.tasks.sources import digest_of_sources
from instar.tasks.task import Batch, Measured, SampleSetSpec, SavedModel, Tally, Task


@dataclass(frozen=True, eq=False)
class CustomSpec(SampleSetSpec):
    """`TaskSpec` of a user's task; imports its module, and so torch."""

    task_class = "instar.tasks.user_task:UserTask"

    custom_task: CustomTask[Any, Any]
    first: tuple[weakref.ref[nn.Parameter], ...]
    """parameters of the model that was built to open the data"""
    unused: tuple[str, ...]
    """settings of a DataLoader that `samples` returned and the run does not follow, in words"""

    @classmethod
    def open(cls, loaded_config: Loaded, world_size: int) -> Self:  # noqa: ARG003
        config = loaded_config.config
        digest_of_sources(config.task)  # before anyone edits what has been imported
        task, shape = _instance(config)
        with _telling(f"{config.task}.module() failed"):
            module = build_module(task, shape, config.seed)
        shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
        if shape is None:
            shape = Fixed(tuple(shapes.items()))
        else:
            check_table(config.task, shape, shapes)
            check_shape_buffers(config.task, shape, _facts_in(module))
        first = tuple(map(weakref.ref, module.parameters()))
        del module
        data, unused = _open_source(task, config)
        data.held_out("val")
        return cls(config, shape, data, task, first, tuple(unused))

    @classmethod
    def saved(cls, config: RunConfig, architecture: Mapping[str, Any]) -> SavedModel:
        task, shape = _instance(config)
        if shape is None:
            with _telling(f"{config.task}.module() failed"):
                module = build_module(task, None, config.seed)
            shape = Fixed(tuple((n, tuple(p.shape)) for n, p in module.named_parameters()))
        return SavedModel(
            shape,
            architecture,
            lambda shape: build_module(task, shape, config.seed),
            lambda shape: module_facts(task, shape, config.seed),
        )

    @property
    def unit(self) -> str:
        return self.custom_task.unit

    @property
    def warnings(self) -> list[str]:
        return [f"{self.config.task}: {text}" for text in self.unused]

    @property
    def refuses_shards(self) -> str:
        return self.custom_task.refuses_shards

    @property
    def built(self) -> Sequence[weakref.ref[nn.Parameter]]:
        return self.first

    def facts(self, shape: Any) -> ModuleFacts:
        return module_facts(self.custom_task, shape, self.config.seed)

    def flops(self, architecture: Any, context: int) -> int:  # noqa: ARG002
        return self.custom_task.flops(architecture)

    @property
    def flops_remark(self) -> str:
        """See `TaskSpec`: without a table, how often a module is applied to a sample is not known."""
        counts = type(self.custom_task).flops is not CustomTask.flops
        if counts or isinstance(self.architecture, Shape):
            return ""
        return f"{self.config.task} has no flops(self, shape), nor a shape() whose table tells the FLOPs of a sample"


class UserTask(Task):
    """`Task` of a `CustomTask`: calls it, and checks what it returns."""

    spec: CustomSpec

    @property
    def custom_task(self) -> CustomTask[Any, Any]:
        """The user's object."""
        return self.spec.custom_task

    @property
    def _name(self) -> str:
        return name_of(self.custom_task)

    @property
    def random(self) -> bool:
        """Always true: a user's model may draw, so generators are seeded for every micro-batch."""
        return True

    def shell(self) -> nn.Module:
        return build_module(self.custom_task, self.architecture, self.config.seed)

    def optimizer(self, model: nn.Module) -> Any:
        with exits_fail(f"{self._name}.optimizer"):
            return self.custom_task.optimizer(model, self.config.optimizer)

    def lr_share(self, step: int, end: int | None) -> float | None:
        with exits_fail(f"{self._name}.schedule"):
            share = self.custom_task.schedule(step, end)
        if share is None or (isinstance(share, int | float) and 0.0 <= share < math.inf):
            return share
        raise ValueError(
            f"{self._name}.schedule must return a share of the learning rate, at least 0, not "
            f"{share!r} at step {step}"
        )

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return at_least_float32(self._losses(model, batch, self._collate(batch))[0]).sum()

    def hooks(self) -> Sequence[object]:
        return (self.custom_task,)

    def set_metrics(self) -> Mapping[str, Any]:
        with exits_fail(f"{self._name}.metrics"):
            metrics: object = self.custom_task.metrics()
        if not isinstance(metrics, Mapping):
            kind = kind_of(metrics)
            raise ValueError(f"{self._name}.metrics must return metrics by name, not {kind}")
        if unknown := metrics.keys() - self.custom_task.better.keys():
            raise ValueError(
                f"{self._name}.better must name {', '.join(sorted(unknown))} of metrics() too, "
                "and whether max or min is better"
            )
        return metrics

    def measure(self, model: nn.Module, batch: Batch, *, predict: bool = False) -> Measured:
        user_batch = self._collate(batch)
        losses, outputs = self._losses(model, batch, user_batch)
        with exits_fail(f"{self._name}.measure"):
            result = self.custom_task.measure(outputs, user_batch)
        if not isinstance(result, Mapping):
            raise ValueError(
                f"{self._name}.measure must return tensors by name, not {kind_of(result)}"
            )
        values = {"loss": losses, **result}
        better = self.custom_task.better
        if missing := [name for name in better if name not in values]:
            raise ValueError(f"{self._name}.measure gave no {', '.join(missing)}")
        if unknown := values.keys() - {"loss", *better}:
            raise ValueError(
                f"{self._name}.better must name {', '.join(sorted(map(str, unknown)))} of measure() too, "
                "and whether max or min is better"
            )
        inputs = {name: values[name] for name in better if isinstance(values[name], tuple)}
        tallies, weights = {}, torch.ones_like(losses)
        for name in self.metrics:
            if name not in inputs:
                self._check_each(f"measure's {name}", values[name], batch)
                tallies[name] = Tally(values[name], weights)
        predictions = self._predictions(outputs, batch, user_batch) if predict else {}
        return Measured(tallies, inputs, predictions)

    def _predictions(self, outputs: Any, batch: Batch, user_batch: Any) -> Columns:
        with exits_fail(f"{self._name}.predict"):
            predictions = self.custom_task.predict(outputs, user_batch)
        if not isinstance(predictions, Mapping):
            raise ValueError(
                f"{self._name}.predict must return tensors by name, not {kind_of(predictions)}"
            )
        for name, values in predictions.items():
            first = values[:, 0] if isinstance(values, Tensor) and values.ndim == 2 else values
            self._check_each(f"predict's {name}", first, batch)
        return {name: _numbers(values) for name, values in predictions.items()}

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        with exits_fail(f"{self._name}.outputs"):
            outputs: object = self.custom_task.outputs(model, self._collate(batch))
        if not (
            isinstance(outputs, Tensor)
            and outputs.is_floating_point()
            and outputs.ndim
            and outputs.numel()
        ):
            raise ValueError(
                f"{self._name}.outputs must return one tensor of floating-point numbers, by "
                f"which growth is checked, not {kind_of(outputs)}; where the model returns something "
                "else, define outputs(self, model, batch), e.g. return model(batch['x'])[0]"
            )
        return outputs

    def _collate(self, batch: Batch) -> Any:
        """Return what the user's `collate` makes of a batch; the batch itself without one."""
        if type(self.custom_task).collate is CustomTask.collate:
            return batch
        with exits_fail(f"{self._name}.collate"):
            return self.custom_task.collate(_split_samples(batch))

    def _losses(self, model: nn.Module, batch: Batch, user_batch: Any) -> tuple[Tensor, Any]:
        """Return the losses, and what `measure` and `predict` get: outputs, or the model."""
        with exits_fail(f"{self._name}.loss"):
            losses: Any = self.custom_task.loss(model, user_batch)
        outputs: Any = model
        if isinstance(losses, tuple) and len(losses) == 2:
            losses, outputs = losses
        self._check_each("loss", losses, batch)
        return losses, outputs

    def _check_each(self, what: str, values: object, batch: Batch) -> None:
        samples = _samples(batch)
        if not isinstance(values, Tensor):
            hint = ": it returns nothing" if values is None else ""
            raise ValueError(
                f"{self._name}.{what} must be a tensor [samples], one value for each of "
                f"{samples}, not {kind_of(values)}{hint}"
            )
        if values.shape != (samples,):
            hint = ": say reduction='none'" if what == "loss" else ""
            if values.ndim > 1 and len(values) == samples:
                hint = ": take the mean over the other axes, e.g. .flatten(1).mean(1)"
            raise ValueError(
                f"{self._name}.{what} must be [samples], one for each of {samples}, not {list(values.shape)}{hint}"
            )


def _instance(config: RunConfig) -> tuple[CustomTask[Any, Any], Growable | None]:
    """Return an instance of the user's class, and its shape at step 0."""
    name, task_class = config.task, custom_task_class(config.task)
    if not issubclass(task_class, CustomTask):
        raise ConfigError.at(
            "task", f"{name} is no subclass of CustomTask", "class MyTask(CustomTask): …"
        )
    missing = [n for n in NEEDED if getattr(task_class, n) is getattr(CustomTask, n)]
    if missing:
        raise ConfigError.at(
            "task", f"{name} lacks {', '.join(missing)}", "docs/custom-task.md has an example"
        )
    assert isinstance(config.data, SamplesConfig)
    with _telling(f"{name} cannot be made"):
        section = _section(task_class, config)
        task: CustomTask[Any, Any] = task_class(section, config.data, config.data_seed)
    with _telling(f"{name}.shape() failed"):
        shape = task.shape()
    if shape is not None:
        _check_shape(f"{name}.shape()", shape)
    return task, shape


def _section(task: type[CustomTask[Any, Any]], config: RunConfig) -> Section:
    """Return the section `model` as the user's class, without the key `from`."""
    fields_set = config.model.model_fields_set
    values = {name: getattr(config.model, name) for name in task.Model.model_fields}
    return task.Model.model_construct(fields_set & values.keys(), **values)


def _open_source(
    task: CustomTask[Any, Any], config: RunConfig
) -> tuple[SampleSet | StreamedSet, Sequence[str]]:
    """Return the user's samples, split by themselves or as the config says, and which settings of a
    DataLoader that held them are not used."""
    name, data = config.task, config.data
    assert isinstance(data, SamplesConfig)
    with _telling(f"{name}.samples() failed"):
        samples = task.samples()
    try:
        dataset = sample_set(task.samples, samples, task.fields, data, config.data_seed)
        return dataset, unused_settings(samples, config)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError.at("task", f"{name}.samples(): {what_happened(error)}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError.at("task", f"{name}.samples(): {what_happened(error)}") from error


def build_module(task: CustomTask[Any, Any], shape: Any, seed: int) -> nn.Module:
    """Build a model whose initial values depend on the seed alone.

    Raises:
        TypeError, ValueError: `module` returned something that cannot be trained.
    """
    with torch.random.fork_rng(devices=[]), exits_fail(f"{name_of(task)}.module"):
        torch.manual_seed(seed)
        module: object = task.module(shape)
    if not isinstance(module, nn.Module):
        raise TypeError(f"module() must return a torch.nn.Module, not {kind_of(module)}")
    check_trainable(module)
    for submodule in module.modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            if 0 in buffer.stride():
                # resuming and DDP write into buffers, which an expanded tensor does not allow
                setattr(submodule, name, buffer.contiguous())
    return module


def module_facts(task: CustomTask[Any, Any], shape: Any, seed: int) -> ModuleFacts:
    """Return the facts of a module of this shape; builds the module once per shape."""
    cache: dict[str, ModuleFacts] = vars(task).setdefault("_facts", {})
    key = repr(shape)
    if key not in cache:
        with _telling(f"{name_of(task)}.module() failed for {shape}"):
            cache[key] = _facts_in(build_module(task, shape, seed))
    return cache[key]


def _facts_in(module: nn.Module) -> ModuleFacts:
    return ModuleFacts(
        frozenset(name for name, p in module.named_parameters() if not p.requires_grad),
        {name: tuple(buffer.shape) for name, buffer in persistent_buffers(module).items()},
    )


def _check_shape(where: str, shape: Any) -> None:
    """Raise ConfigError if a shape cannot grow."""
    growable: Growable = shape
    if not (dataclasses.is_dataclass(shape) and hasattr(shape, "resized")):
        raise ConfigError.at(
            "task",
            f"{where} must return a Shape, not {kind_of(shape)}",
            "@dataclass(frozen=True) class Axes(Shape): one field an axis, and table(self, t)",
        )
    with _telling(f"{where}: its table failed"):
        growable.parameters()


def name_of(task: CustomTask[Any, Any]) -> str:
    return type(task).__name__


def kind_of(value: object) -> str:
    """Describe a value for an error message."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, value))}"
    return "None" if value is None else f"a {type(value).__name__}"


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """Context manager for user code before a run starts: its errors become ConfigErrors."""
    try:
        yield
    except ConfigError:
        raise
    except InstarError as error:
        raise ConfigError.at("task", f"{what}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError.at("task", f"{what}: {what_happened(error)}") from error


def _numbers(values: Tensor) -> NDArray[Any]:
    """Convert to a type that NumPy and Parquet have: bfloat16 and float16 become float32."""
    numbers: NDArray[Any] = at_least_float32(values.detach().cpu()).numpy()
    return numbers


def _split_samples(batch: Batch) -> list[dict[str, Tensor]]:
    """Return the samples of a batch, as views."""
    columns: dict[str, Sequence[Tensor]] = {}
    for name, values in batch.items():
        if (offsets := batch.get(f"{name}.offsets")) is not None:
            columns[name] = torch.split(values, offsets.diff().tolist())
        elif not (name.endswith(".offsets") and name.removesuffix(".offsets") in batch):
            columns[name] = values.unbind()
    return [dict(zip(columns, parts, strict=True)) for parts in zip(*columns.values(), strict=True)]


def _samples(batch: Batch) -> int:
    """Return the number of samples of a batch."""
    name, first = next(iter(batch.items()))
    offsets = batch.get(f"{name}.offsets")
    return len(first) if offsets is None else len(offsets) - 1
