"""Custom tasks: train a user's PyTorch model.

The config names a subclass of `CustomTask`, `task: module:class`. Everything else works as for the
built-in tasks.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from instar.config.errors import ConfigError, InstarError
from instar.config.fields import custom_task_class
from instar.config.load import Loaded
from instar.config.schema import Direction, OptimizerConfig, RunConfig, SamplesConfig
from instar.config.sections import Section
from instar.config.user_code import what_happened
from instar.data.columns import Columns
from instar.data.split import SampleSet
from instar.data.user_sets import StreamedSet, sample_set
from instar.data.user_source import loader_batch
from instar.distributed.failure import exits_fail
from instar.models.loss import at_least_float32
from instar.models.module import check_trainable, persistent_buffers
from instar.models.shape import Fixed, Growable, ModuleFacts, count_parameters
from instar.models.table import Shape, check_buffers, check_table
from instar.tasks import logged
from instar.tasks.task import Batch, Measured, SampleSetSpec, SavedModel, Tally, Task

M = TypeVar("M", bound=Section)
D = TypeVar("D", bound=SamplesConfig)


class CustomTask(Generic[M, D]):
    """Base class of a user's task. Subclasses must define `samples`, `module` and `loss`."""

    Model: ClassVar[type[Section]] = Section
    """class of the config's section `model`"""
    Data: ClassVar[type[SamplesConfig]] = SamplesConfig
    """class of the config's section `data`"""
    better: ClassVar[Mapping[str, Direction]] = {}
    """metrics in addition to the loss, and whether higher (max) or lower (min) is better"""
    unit: ClassVar[str] = "sample"
    """name of a sample, for the display"""
    fields: ClassVar[Sequence[str]] = ()
    """names of the parts of a sample that is a tuple, as torch data sets return"""

    def __init__(self, model: M, data: D, seed: int) -> None:
        """
        Args:
            seed: seed of the data: `data.seed`, or the run's seed if that is not set.
        """
        self.model, self.data, self.seed = model, data, seed

    def samples(self) -> Any:
        """Return all samples, the same in every process; the config says how to split them.

        Returns:
            arrays or tensors by name, each [samples, …] or `Ragged`; a list of samples, each a
            mapping of arrays by name or a tuple; a data set of torch, `datasets` or PyTorch
            Geometric; an iterable; a `Source`; or one of these for each split, by the names train,
            val and test.
        """
        raise NotImplementedError

    def collate(self, samples: Sequence[Batch]) -> Any:
        """Return the batch that the other methods get, e.g. padded, or a graph batch.

        Args:
            samples: the tensors of each sample, by name.

        Default: the columns of all samples; see `Batch`.
        """
        raise NotImplementedError

    def shape(self) -> Growable | None:
        """Return the shape of the model at step 0, whose named axes can grow; None: no growth."""
        return None

    def module(self, shape: Any) -> nn.Module:
        """Build a model of this shape. torch's generator is seeded for its initial values."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> Tensor | tuple[Tensor, Any]:
        """Return the loss of each sample of a batch, [samples], or a pair of it and of any outputs.

        With outputs, `measure` and `predict` receive them in place of the model, so that an
        evaluation runs the model once.
        """
        raise NotImplementedError

    def metrics(self) -> Mapping[str, Any]:
        """Return new metrics of a whole evaluation set by name, each a `torchmetrics.Metric` or a
        function that takes NumPy arrays of all samples and returns a number."""
        return {}

    def measure(self, model: Any, batch: Batch) -> Mapping[str, Any]:  # noqa: ARG002
        """Return what each metric that `better` names is computed from.

        Returns:
            values per sample, [samples], whose mean is the metric; for one of `metrics`, a tuple of
            the tensors that it takes, such as predictions and targets.
        """
        return {}

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the model's outputs, which the proof of growth compares.

        Default: the model applied to the batch's first column.
        """
        said: Tensor = model(next(iter(batch.values())))
        return said

    def predict(self, model: Any, batch: Batch) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Return the columns that the final test saves, per sample: [samples] or [samples, n]."""
        return {}

    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> Any:  # noqa: ARG002
        """Return an optimizer for the model, several, or parameter groups for the config's optimizer;
        None: as the config says. Called again for the grown model.

        Learning rates are peak rates, which the schedule multiplies; `config.lr` is the config's.
        """
        return None

    def schedule(self, step: int, steps: int | None) -> float | None:  # noqa: ARG002
        """Return the share of the peak learning rate at a step, counted from 0; None: as the config
        says.

        Args:
            steps: learning_rate.lr_decay_iters: by default the steps of the run; None: unknown.
        """
        return None

    log = staticmethod(logged.log)
    log_image = staticmethod(logged.log_image)
    log_table = staticmethod(logged.log_table)

    def flops(self, shape: Growable) -> int:
        """Forward and backward FLOPs per sample. Default: 3 times those of the shape's table;
        without one, 6 per weight of a matrix."""
        if isinstance(shape, Shape):
            return 3 * shape.flops()
        return 6 * count_parameters(shape).matmul


NEEDED = ("samples", "module", "loss")
"""Methods that a task must define."""


@dataclass(frozen=True, eq=False)
class CustomSpec(SampleSetSpec):
    """`TaskSpec` of a user's task; imports its module, and so torch."""

    task_class = "instar.tasks.custom:UserTask"

    own: CustomTask[Any, Any]
    first: tuple[weakref.ref[nn.Parameter], ...]
    """parameters of the model that was built to open the data"""
    unused_batch: int | None
    """the batch size of a DataLoader that `samples` returned; None: it returned something else"""

    @classmethod
    def open(cls, loaded: Loaded, world_size: int) -> Self:  # noqa: ARG003
        config = loaded.config
        own, shape = _instance(config)
        with _telling(f"{config.task}.module() failed"):
            module = made(own, shape, config.seed)
        named = {n: tuple(p.shape) for n, p in module.named_parameters()}
        if shape is None:
            shape = Fixed(tuple(named.items()))
        else:
            check_table(config.task, shape, named)
            check_buffers(config.task, shape, _facts_in(module))
        first = tuple(map(weakref.ref, module.parameters()))
        del module
        data, unused_batch = _opened(own, config)
        data.held_out("val")
        return cls(config, shape, data, own, first, unused_batch)

    @classmethod
    def saved(cls, config: RunConfig, architecture: Mapping[str, Any]) -> SavedModel:
        own, shape = _instance(config)
        if shape is None:
            with _telling(f"{config.task}.module() failed"):
                module = made(own, None, config.seed)
            shape = Fixed(tuple((n, tuple(p.shape)) for n, p in module.named_parameters()))
        return SavedModel(
            shape,
            architecture,
            lambda shape: made(own, shape, config.seed),
            lambda shape: module_facts(own, shape, config.seed),
        )

    @property
    def unit(self) -> str:
        return self.own.unit

    @property
    def warnings(self) -> list[str]:
        size, unused = self.config.train.batch_size, self.unused_batch
        if unused in (None, size):
            return []
        text = f"train.batch_size {size} is used, not the batch_size {unused} of the DataLoader"
        return [f"{self.config.task}: {text}"]

    @property
    def built(self) -> Sequence[weakref.ref[nn.Parameter]]:
        return self.first

    def facts(self, shape: Any) -> ModuleFacts:
        return module_facts(self.own, shape, self.config.seed)

    def flops(self, architecture: Any, context: int) -> int:  # noqa: ARG002
        return self.own.flops(architecture)


class UserTask(Task):
    """`Task` of a `CustomTask`: calls it, and checks what it returns."""

    spec: CustomSpec

    @property
    def own(self) -> CustomTask[Any, Any]:
        """The user's object."""
        return self.spec.own

    @property
    def random(self) -> bool:
        """Always true: a user's model may draw, so generators are seeded for every micro-batch."""
        return True

    def shell(self) -> nn.Module:
        return made(self.own, self.architecture, self.config.seed)

    def optimizer(self, model: nn.Module) -> Any:
        with exits_fail(f"{_name(self.own)}.optimizer"):
            return self.own.optimizer(model, self.config.optimizer)

    def lr_share(self, step: int, end: int | None) -> float | None:
        with exits_fail(f"{_name(self.own)}.schedule"):
            share = self.own.schedule(step, end)
        if share is None or (isinstance(share, int | float) and 0.0 <= share < math.inf):
            return share
        raise ValueError(
            f"{_name(self.own)}.schedule must return a share of the learning rate, at least 0, not "
            f"{share!r} at step {step}"
        )

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return at_least_float32(self._losses(model, batch, self._collated(batch))[0]).sum()

    def hooks(self) -> Sequence[object]:
        return (self.own,)

    def set_metrics(self) -> Mapping[str, Any]:
        with exits_fail(f"{_name(self.own)}.metrics"):
            found: object = self.own.metrics()
        if not isinstance(found, Mapping):
            raise ValueError(
                f"{_name(self.own)}.metrics must return metrics by name, not {_kind(found)}"
            )
        if unknown := found.keys() - self.own.better.keys():
            raise ValueError(
                f"{_name(self.own)}.better must name {', '.join(sorted(unknown))} of metrics() too, "
                "and whether max or min is better"
            )
        return found

    def measure(self, model: nn.Module, batch: Batch, *, predict: bool = False) -> Measured:
        collated = self._collated(batch)
        losses, outputs = self._losses(model, batch, collated)
        with exits_fail(f"{_name(self.own)}.measure"):
            measured = self.own.measure(outputs, collated)
        if not isinstance(measured, Mapping):
            raise ValueError(
                f"{_name(self.own)}.measure must return tensors by name, not {_kind(measured)}"
            )
        given = {"loss": losses, **measured}
        if missing := [name for name in self.own.better if name not in given]:
            raise ValueError(f"{_name(self.own)}.measure gave no {', '.join(missing)}")
        inputs = {name: given[name] for name in self.own.better if isinstance(given[name], tuple)}
        tallies, ones = {}, torch.ones_like(losses)
        for name in self.metrics:
            if name not in inputs:
                self._check_each(f"measure's {name}", given[name], batch)
                tallies[name] = Tally(given[name], ones)
        predictions = self._predictions(outputs, batch, collated) if predict else {}
        return Measured(tallies, inputs, predictions)

    def _predictions(self, outputs: Any, batch: Batch, collated: Any) -> Columns:
        with exits_fail(f"{_name(self.own)}.predict"):
            said = self.own.predict(outputs, collated)
        if not isinstance(said, Mapping):
            raise ValueError(
                f"{_name(self.own)}.predict must return tensors by name, not {_kind(said)}"
            )
        for name, values in said.items():
            first = values[:, 0] if isinstance(values, Tensor) and values.ndim == 2 else values
            self._check_each(f"predict's {name}", first, batch)
        return {name: _numbers(values) for name, values in said.items()}

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        with exits_fail(f"{_name(self.own)}.outputs"):
            said: object = self.own.outputs(model, self._collated(batch))
        if not (
            isinstance(said, Tensor) and said.is_floating_point() and said.ndim and said.numel()
        ):
            raise ValueError(
                f"{_name(self.own)}.outputs must return one tensor of floating-point numbers, by "
                f"which growth is checked, not {_kind(said)}; where the model returns something "
                "else, define outputs(self, model, batch), e.g. return model(batch['x'])[0]"
            )
        return said

    def _collated(self, batch: Batch) -> Any:
        """Return what the user's `collate` makes of a batch; the batch itself without one."""
        if type(self.own).collate is CustomTask.collate:
            return batch
        with exits_fail(f"{_name(self.own)}.collate"):
            return self.own.collate(_each(batch))

    def _losses(self, model: nn.Module, batch: Batch, collated: Any) -> tuple[Tensor, Any]:
        """Return the losses, and what `measure` and `predict` get: outputs, or the model."""
        with exits_fail(f"{_name(self.own)}.loss"):
            losses: Any = self.own.loss(model, collated)
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
                f"{_name(self.own)}.{what} must be a tensor [samples], one value for each of "
                f"{samples}, not {_kind(values)}{hint}"
            )
        if values.shape != (samples,):
            hint = ": say reduction='none'" if what == "loss" else ""
            if values.ndim > 1 and len(values) == samples:
                hint = ": take the mean over the other axes, e.g. .flatten(1).mean(1)"
            raise ValueError(
                f"{_name(self.own)}.{what} must be [samples], one for each of {samples}, not "
                f"{list(values.shape)}{hint}"
            )


def _instance(config: RunConfig) -> tuple[CustomTask[Any, Any], Growable | None]:
    """Return an instance of the user's class, and its shape at step 0."""
    name, found = config.task, custom_task_class(config.task)
    if not issubclass(found, CustomTask):
        raise _wrong(f"{name} is no subclass of CustomTask", "class MyTask(CustomTask): …")
    missing = [n for n in NEEDED if getattr(found, n) is getattr(CustomTask, n)]
    if missing:
        raise _wrong(f"{name} lacks {', '.join(missing)}", "docs/custom-task.md has an example")
    assert isinstance(config.data, SamplesConfig)
    with _telling(f"{name} cannot be made"):
        own: CustomTask[Any, Any] = found(_section(found, config), config.data, config.data_seed)
    with _telling(f"{name}.shape() failed"):
        shape = own.shape()
    if shape is not None:
        _check_shape(f"{name}.shape()", shape)
    return own, shape


def _section(task: type[CustomTask[Any, Any]], config: RunConfig) -> Section:
    """Return the section `model` as the user's class, without the key `from`."""
    given = config.model.model_fields_set
    values = {name: getattr(config.model, name) for name in task.Model.model_fields}
    return task.Model.model_construct(given & values.keys(), **values)


def _opened(
    own: CustomTask[Any, Any], config: RunConfig
) -> tuple[SampleSet | StreamedSet, int | None]:
    """Return the user's samples, split by themselves or as the config says, and the batch size of a
    DataLoader that held them."""
    name, data = config.task, config.data
    assert isinstance(data, SamplesConfig)
    with _telling(f"{name}.samples() failed"):
        given = own.samples()
    try:
        found = sample_set(own.samples, given, own.fields, data, config.data_seed)
        return found, loader_batch(given)
    except ConfigError:
        raise
    except ValueError as error:
        raise _wrong(f"{name}.samples(): {what_happened(error)}") from None
    except (Exception, SystemExit) as error:
        raise _wrong(f"{name}.samples(): {what_happened(error)}") from error


def made(own: CustomTask[Any, Any], shape: Any, seed: int) -> nn.Module:
    """Build a model whose initial values depend on the seed alone.

    Raises:
        TypeError, ValueError: `module` returned something that cannot be trained.
    """
    with torch.random.fork_rng(devices=[]), exits_fail(f"{_name(own)}.module"):
        torch.manual_seed(seed)
        module: object = own.module(shape)
    if not isinstance(module, nn.Module):
        raise TypeError(f"module() must return a torch.nn.Module, not {_kind(module)}")
    check_trainable(module)
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            if 0 in buffer.stride():
                # resuming and DDP write into buffers, which an expanded tensor does not allow
                setattr(each, name, buffer.contiguous())
    return module


def module_facts(own: CustomTask[Any, Any], shape: Any, seed: int) -> ModuleFacts:
    """Return the facts of a module of this shape; builds the module once per shape."""
    known: dict[str, ModuleFacts] = vars(own).setdefault("_facts", {})
    key = repr(shape)
    if key not in known:
        with _telling(f"{_name(own)}.module() failed for {shape}"):
            known[key] = _facts_in(made(own, shape, seed))
    return known[key]


def _facts_in(module: nn.Module) -> ModuleFacts:
    return ModuleFacts(
        frozenset(name for name, p in module.named_parameters() if not p.requires_grad),
        {name: tuple(buffer.shape) for name, buffer in persistent_buffers(module).items()},
    )


def _check_shape(where: str, shape: Any) -> None:
    """Raise ConfigError if a shape cannot grow."""
    growable: Growable = shape
    if not (dataclasses.is_dataclass(shape) and hasattr(shape, "resized")):
        raise _wrong(
            f"{where} must return a Shape, not {_kind(shape)}",
            "@dataclass(frozen=True) class Axes(Shape): one field an axis, and table(self, t)",
        )
    with _telling(f"{where}: its table failed"):
        growable.parameters()


def _numbers(values: Tensor) -> NDArray[Any]:
    """Convert to a type that NumPy and Parquet have: bfloat16 and float16 become float32."""
    numbers: NDArray[Any] = at_least_float32(values.detach().cpu()).numpy()
    return numbers


def _each(batch: Batch) -> list[dict[str, Tensor]]:
    """Return the samples of a batch, as views."""
    columns: dict[str, Sequence[Tensor]] = {}
    for name, values in batch.items():
        if (offsets := batch.get(f"{name}.offsets")) is not None:
            columns[name] = torch.split(values, offsets.diff().tolist())
        elif not (name.endswith(".offsets") and name.removesuffix(".offsets") in batch):
            columns[name] = values.unbind()
    return [dict(zip(columns, parts, strict=True)) for parts in zip(*columns.values(), strict=True)]


def _samples(batch: Batch) -> int:
    """Number of samples of a batch."""
    name, first = next(iter(batch.items()))
    offsets = batch.get(f"{name}.offsets")
    return len(first) if offsets is None else len(offsets) - 1


def _name(own: CustomTask[Any, Any]) -> str:
    return type(own).__name__


def _kind(value: object) -> str:
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
        raise _wrong(f"{what}: {error}") from error
    except (Exception, SystemExit) as error:
        raise _wrong(f"{what}: {what_happened(error)}") from error


def _wrong(message: str, hint: str = "") -> ConfigError:
    return ConfigError.one(message, where="task", hint=hint, key="task")
