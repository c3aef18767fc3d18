"""Opening a custom task: makes the user's object, its samples and its model, and checks them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from instar.config.errors import ConfigError, InstarError
from instar.config.fields import custom_task_class
from instar.config.load import Loaded
from instar.config.schema import RunConfig, SamplesConfig
from instar.config.sections import Section
from instar.config.user_code import what_happened
from instar.data.split import SampleSet
from instar.data.user_sets import StreamedSet, sample_set
from instar.data.user_source import loader_batch
from instar.distributed.failure import exits_fail
from instar.models.module import check_trainable, persistent_buffers
from instar.models.shape import Fixed, Growable, ModuleFacts
from instar.models.table import check_shape_buffers, check_table
from instar.tasks.basis import digest_of_sources
from instar.tasks.custom import NEEDED, CustomTask
from instar.tasks.task import SampleSetSpec, SavedModel


@dataclass(frozen=True, eq=False)
class CustomSpec(SampleSetSpec):
    """`TaskSpec` of a user's task; imports its module, and so torch."""

    task_class = "instar.tasks.user_task:UserTask"

    custom_task: CustomTask[Any, Any]
    first: tuple[weakref.ref[nn.Parameter], ...]
    """parameters of the model that was built to open the data"""
    unused_batch: int | None
    """the batch size of a DataLoader that `samples` returned; None: it returned something else"""

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
        data, unused_batch = _open_source(task, config)
        data.held_out("val")
        return cls(config, shape, data, task, first, unused_batch)

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
        size, unused_batch = self.config.train.batch_size, self.unused_batch
        if unused_batch in (None, size):
            return []
        text = (
            f"train.batch_size {size} is used, not the batch_size {unused_batch} of the DataLoader"
        )
        return [f"{self.config.task}: {text}"]

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


def _instance(config: RunConfig) -> tuple[CustomTask[Any, Any], Growable | None]:
    """Return an instance of the user's class, and its shape at step 0."""
    name, task_class = config.task, custom_task_class(config.task)
    if not issubclass(task_class, CustomTask):
        raise _wrong(f"{name} is no subclass of CustomTask", "class MyTask(CustomTask): …")
    missing = [n for n in NEEDED if getattr(task_class, n) is getattr(CustomTask, n)]
    if missing:
        raise _wrong(f"{name} lacks {', '.join(missing)}", "docs/custom-task.md has an example")
    assert isinstance(config.data, SamplesConfig)
    with _telling(f"{name} cannot be made"):
        task: CustomTask[Any, Any] = task_class(
            _section(task_class, config), config.data, config.data_seed
        )
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
) -> tuple[SampleSet | StreamedSet, int | None]:
    """Return the user's samples, split by themselves or as the config says, and the batch size of a
    DataLoader that held them."""
    name, data = config.task, config.data
    assert isinstance(data, SamplesConfig)
    with _telling(f"{name}.samples() failed"):
        samples = task.samples()
    try:
        dataset = sample_set(task.samples, samples, task.fields, data, config.data_seed)
        return dataset, loader_batch(samples)
    except ConfigError:
        raise
    except ValueError as error:
        raise _wrong(f"{name}.samples(): {what_happened(error)}") from None
    except (Exception, SystemExit) as error:
        raise _wrong(f"{name}.samples(): {what_happened(error)}") from error


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
        raise _wrong(
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
        raise _wrong(f"{what}: {error}") from error
    except (Exception, SystemExit) as error:
        raise _wrong(f"{what}: {what_happened(error)}") from error


def _wrong(message: str, hint: str = "") -> ConfigError:
    return ConfigError.of(message, where="task", hint=hint, key="task")
