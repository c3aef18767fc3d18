"""Trial: one micro-batch of a task, forward and backward, before anything of a run is created.

It finds mistakes in a user's model, loss or samples, instead of step 1 or the first growth. The
model is discarded, and random generators are restored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from instar.config.errors import ConfigError
from instar.config.schema import RunConfig
from instar.config.torch_optim.optimizers import OPTIMIZERS
from instar.config.user_code.failures import what_happened
from instar.data.columns import Columns, Ragged, cut, dtype_of, leaves, not_finite
from instar.data.loader import OpenEnded
from instar.data.sample_set import SampleSet
from instar.data.source import InMemorySource
from instar.distributed.failure import RunFailed
from instar.distributed.world import World
from instar.growth.plan import GrowthError
from instar.models.hf.pretrained import PretrainedShape
from instar.models.table import check_table
from instar.record.device import torch_dtype
from instar.run.optimizer import check_states, optimizer_tensors, shapes_of, task_optimizers
from instar.run.parallel.micro_batch_sizes import Comes, sizes_to_come
from instar.run.rates import rate_factors
from instar.run.start.preflight import Prepared
from instar.run.state.generators import generator_states, restore_generators, seed_generators
from instar.run.step.stepper import set_model_step, to_device
from instar.schedule.triggers import schedule_entries
from instar.tasks.logged import Logged, recording
from instar.tasks.metrics import set_metrics, try_out
from instar.tasks.task import Batch, SampleSetSpec, Task


def run_trial(prepared_run: Prepared, world: World) -> list[str]:
    """Run one micro-batch as in training, evaluation and growth.

    Rank-local, without collectives. Tasks on text are built in and not tried, but for the schedule of a
    family of models that is not.

    Returns:
        warnings.

    Raises:
        ConfigError: the run would fail; says why in terms of the task.
    """
    if not isinstance(prepared_run.spec, SampleSetSpec):
        _check_family(prepared_run)
        return []
    with _undo_at_end(world):
        return _Trial(prepared_run, world, prepared_run.spec).run()


def try_sizes(prepared_run: Prepared, world: World, sizes: Mapping[int, Comes]) -> list[str]:
    """Run micro-batches of the sizes that a resumed run comes to, and of an evaluation; as `run_trial`.

    Raises:
        ConfigError: one fails.
    """
    if not isinstance(prepared_run.spec, SampleSetSpec):
        return []
    with _undo_at_end(world):
        trial = _Trial(prepared_run, world, prepared_run.spec)
        task = prepared_run.spec.task(prepared_run.config)
        samples = trial.training_samples(max(sizes))
        model = trial.model_of(task)
        warnings = trial.try_sizes(task, model, samples, sizes)
        model.zero_grad(set_to_none=True)
        trial._evaluate(task, model, trial._held_out())  # the task's code may be newer than the run
        return warnings


@contextmanager
def _undo_at_end(world: World) -> Iterator[None]:
    """Restore the generators afterwards, and free the device's memory."""
    generators = generator_states(world.device)
    try:
        yield
    finally:
        restore_generators(generators, world.device)
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def _check_family(prepared_run: Prepared) -> None:
    operations = [entry.operation for entry in schedule_entries(prepared_run.config)]
    shape = prepared_run.spec.architecture
    if not operations or not isinstance(shape, PretrainedShape):
        return
    # only a model of transformers has a table of its own to try, and the trial grows a folder
    from instar.growth.folders import check_own_family

    try:
        check_own_family(shape, operations)
    except GrowthError as error:
        raise ConfigError.at("schedule", str(error)) from error


@dataclass(frozen=True)
class _Trial:
    prepared_run: Prepared
    world: World
    spec: SampleSetSpec

    @property
    def config(self) -> RunConfig:
        return self.prepared_run.config

    @property
    def _is_wrapped(self) -> bool:
        """Whether the model that is trained is another one than the task's."""
        is_sharded = self.config.parallel.shards_of(self.world.size) > 1
        return is_sharded or (self.world.size > 1 and self.config.reproducible == "fixed")

    def run(self) -> list[str]:
        task = self.prepared_run.spec.task(self.config)
        model = self.model_of(task)
        samples = self.training_samples(self.config.train.batch_size)
        batch = to_device(samples, self.world.device)
        warnings = self._train(task, model, samples, batch)
        sizes = sizes_to_come(self.config, self.prepared_run.forecast, self.world.size)
        batch_size = len(next(leaves(samples))[1])
        smaller = {size: comes for size, comes in sizes.items() if size < batch_size}
        warnings += self.try_sizes(task, model, samples, smaller)
        held_out = self._held_out()
        model.zero_grad(set_to_none=True)
        self._evaluate(task, model, held_out)
        self._grow(task, model, held_out)
        self._optimize(task, model)
        problem = not_finite(self._in_memory())
        return [*warnings, *([f"{self.config.task}: {problem}"] if problem else [])]

    def model_of(self, task: Task) -> Module:
        """Return the task's model on the device, in training mode."""
        with self._task_errors("module"):
            model = task.build()
            self._check_new(model)
            if self.config.parallel.shards_of(self.world.size) > 1:
                from instar.run.parallel.sharded import check_groups  # takes a while

                check_groups(model)
            model = model.to(self.world.device)
        set_model_step(model, 0)
        return model

    def _in_memory(self) -> Columns:
        """Return all samples if they are in memory, otherwise nothing."""
        source = self.spec.data.source if isinstance(self.spec.data, SampleSet) else None
        return source.columns if isinstance(source, InMemorySource) else {}

    def _check_new(self, model: Module) -> None:
        """Raise ValueError if `module` reuses parameters: each rank and growth need a new model."""
        before = self.prepared_run.spec.built
        alive = {id(parameter) for ref in before if (parameter := ref()) is not None}
        for name, parameter in model.named_parameters():
            if id(parameter) in alive:
                raise ValueError(
                    f"two calls returned the same parameter {name}; module() must make a new model "
                    "at every call, or copy.deepcopy one that is kept"
                )

    def training_samples(self, count: int) -> Columns:
        """Return the first samples of the order: `count`, or all if there are fewer."""
        # do not start workers for one micro-batch
        single_process = replace(
            self.spec.data, data=self.spec.data.data.model_copy(update={"workers": 0})
        )
        with self._task_errors("samples"):
            source, order = single_process.train(self.config.seed)
            if isinstance(order, OpenEnded):
                order.explore(0, count)
            count = min(count, order.samples_per_epoch)
            indices = order.indices(0, 0, count)
            samples, reread = source.read(indices), source.read(indices)
            if differing := _differing(samples, reread):
                raise ValueError(
                    f"{differing} differs when the same samples are read again; random augmentation "
                    "belongs in data.transform, which gets a generator"
                )
            weight = source.weights(indices)
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(
                    f"the first {count} samples weigh {weight:g}, which is not a positive number"
                )
        return samples

    def _held_out(self) -> Columns:
        with self._task_errors("samples"):
            source = self.spec.data.held_out("val")
            size = self.config.eval.batch_size or self.config.train.batch_size
            return source.read(np.arange(min(size, len(source))))

    def _train(self, task: Task, model: Module, samples: Columns, batch: Batch) -> list[str]:
        """Run a forward and a backward pass; return warnings."""
        seed_generators(self.config.seed, 0, 0, self.world.device)
        with self._task_errors("loss", samples, model):
            calls: list[object] = []
            counting = model.register_forward_pre_hook(lambda *_: calls.append(None))
            logged_values = Logged(self.world, of_training=True)
            with counting, self._autocast(), recording(logged_values):
                loss = task.loss_sum(model, batch)
            self._check_loss(loss, model, samples)
            if self._is_wrapped and not calls:
                raise ValueError(
                    "it calls parts of the model, but not the model itself, around whose forward() ranks "
                    "exchange gradients and parameters: let forward() return what the loss needs"
                )
            loss.backward()  # type: ignore[no-untyped-call]
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        half = [n for n, p in trainable.items() if p.dtype == torch.float16]
        if half and self.config.precision == "fp16":
            raise self._error(
                f"{_list_text(half)} is float16 already, and precision: fp16 scales gradients of "
                "float32 parameters",
                "leave the parameters in float32, or set precision: fp32",
            )
        sparse = [n for n, p in trainable.items() if p.grad is not None and p.grad.is_sparse]
        if sparse:
            raise self._error(
                f"{sparse[0]} has sparse gradients, which cannot be clipped or added up",
                "make its module with sparse=False",
            )
        warnings = []
        if unused_names := [name for name, p in trainable.items() if p.grad is None]:
            warnings.append(self._unused_text(unused_names))
        grads = {n: p.grad for n, p in trainable.items() if p.grad is not None}
        if broken := [name for name, grad in grads.items() if not grad.isfinite().all()]:
            warnings.append(
                f"{self.config.task}: the gradient of {_list_text(broken)} is not finite on the first "
                "micro-batch; steps with such a gradient are skipped"
            )
        return warnings

    def try_sizes(
        self, task: Task, model: Module, samples: Columns, sizes: Mapping[int, Comes]
    ) -> list[str]:
        """Run micro-batches of sizes that the run comes to: those of a rank's share of every step, and of the last step
        of an epoch. Return warnings.

        Raises:
            ConfigError: the loss of one fails; says when it comes, and how to do without it.
        """
        warnings = []
        for size, comes in sorted(sizes.items()):
            seed_generators(self.config.seed, 0, 0, self.world.device)
            cut_samples = cut(samples, 0, size)
            batch = to_device(cut_samples, self.world.device)
            what = f"the loss of a micro-batch of {size} sample{'s' if size > 1 else ''}, {comes.when},"
            with self._task_errors(what, cut_samples, model, comes.instead):
                with self._autocast(), recording(Logged(self.world)):
                    loss = task.loss_sum(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
            if not math.isfinite(value := loss.item()):
                warnings.append(f"{self.config.task}: {what} is {value}; {comes.instead}")
        return warnings

    def _check_loss(self, loss: Tensor, model: Module, samples: Columns) -> None:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                "no parameter of the model requires a gradient, so nothing would train"
            )
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not depend on the model's parameters: remove detach(), item(), "
                "numpy() and torch.no_grad() between the model and the loss"
            )
        if not math.isfinite(value := loss.item()):
            problem = not_finite(self._in_memory()) or not_finite(samples)
            cause = f": {problem}" if problem else ""
            raise ValueError(f"the loss of the first micro-batch is {value}{cause}")

    def _unused_text(self, names: list[str]) -> str:
        """Return a warning about unused parameters.

        Raises:
            ConfigError: DDP would wait for their gradients.
        """
        parallel, name_list = self.config.parallel, _list_text(names)
        ddp = self._is_wrapped and parallel.shards_of(self.world.size) == 1
        if ddp and not (parallel.ddp.find_unused_parameters or parallel.ddp.static_graph):
            raise self._error(
                f"{name_list} took no part in the loss of the first micro-batch, and with "
                f"{self.world.size} ranks DDP waits for every parameter's gradient",
                "remove unused parameters, set requires_grad_(False) on them, or set "
                "parallel.ddp.find_unused_parameters: true",
            )
        return (
            f"{self.config.task}: {name_list} took no part in the loss of the first micro-batch, and "
            "may never train"
        )

    def _evaluate(self, task: Task, model: Module, samples: Columns) -> None:
        model.eval()
        batch = to_device(samples, self.world.device)
        predict = self.config.test.at_end and self.config.test.predictions
        with self._task_errors("measure", samples, model), torch.no_grad():
            wholes = set_metrics(task.set_metrics, self.world.device, samples=1)
            with self._autocast(), recording(Logged(self.world)):
                measurement = task.measure(model, batch, predict=predict)
            try_out(wholes, measurement.inputs)

    def _grow(self, task: Task, model: Module, samples: Columns) -> None:
        """Check what the schedule's growth requires of the task."""
        initial, new_architectures = task.architecture, []
        for stage in self.prepared_run.forecast.stages:
            if stage.architecture != initial and stage.architecture not in new_architectures:
                new_architectures.append(stage.architecture)
        if not new_architectures:
            return
        batch = to_device(samples, self.world.device)
        with self._task_errors("outputs", samples, model), torch.no_grad():
            task.outputs(model, batch)
        with self._task_errors("growth: the model cannot be copied"):
            copy.deepcopy(model)
        for architecture in new_architectures:
            with self._task_errors("module"):
                grown_model = task.at(architecture, self.config.context).shell()
                shapes = {name: tuple(p.shape) for name, p in grown_model.named_parameters()}
                check_table(f"{self.config.task} after growth", architecture, shapes)

    def _optimize(self, task: Task, model: Module) -> None:
        """Check what checkpoints, growth and rates that follow the size require of the task."""
        with self._task_errors("optimizer"):
            rate_factors(task.architecture, task.architecture, self.config.optimizer, "adamw")
            if task.optimizer(model) is None:
                name = self.config.optimizer.name
                if not OPTIMIZERS[name].follows_rate and task.lr_share(0, None) is not None:
                    raise ValueError(f"schedule() gives rates, and {name} reads only the first")
                return
            optimizers = task_optimizers(task, model, self.config.optimizer)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.randn_like(parameter)
            before = [_group_values(optimizer) for optimizer in optimizers]
            for optimizer in optimizers:
                optimizer.step()
            after = [_group_values(optimizer) for optimizer in optimizers]
            if before != after:
                raise ValueError(
                    "a step changes values of the parameter groups, which no checkpoint contains; keep "
                    "them in the state of each parameter"
                )
            parameters = dict(model.named_parameters())
            states = optimizer_tensors(optimizers, parameters)
            stages = self.prepared_run.forecast.stages
            if any(stage.architecture != task.architecture for stage in stages):
                check_states(shapes_of(states), shapes_of(parameters))

    def _autocast(self) -> torch.autocast:
        dtype = torch_dtype(self.config.precision)
        enabled = dtype != torch.float32
        return torch.autocast(self.world.device.type, dtype=dtype, enabled=enabled)

    @contextmanager
    def _task_errors(
        self, what: str, samples: Columns | None = None, model: Module | None = None, hint: str = ""
    ) -> Iterator[None]:
        """Context manager: turn errors into a ConfigError that names the task's part and batch."""
        try:
            yield
        except ConfigError:
            raise
        except torch.OutOfMemoryError as error:
            raise self._error(
                f"a micro-batch of {self.config.train.batch_size} samples does not fit in memory: "
                f"{error}",
                "lower train.batch_size, and raise train.gradient_accumulation_steps",
            ) from error
        except (Exception, SystemExit) as error:
            message = str(error) if isinstance(error, RunFailed) else what_happened(error)
            batch = f"; the batch has {_columns_text(samples)}" if samples is not None else ""
            hint = hint or _hint(message, samples, model)
            raise self._error(f"{what} failed: {message}{batch}", hint) from error

    def _error(self, message: str, hint: str = "") -> ConfigError:
        return ConfigError.at("task", f"{self.config.task}: {message}", hint)


def _group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the numbers and words of the parameter groups."""
    return [
        {key: value for key, value in group.items() if isinstance(value, int | float | str)}
        for group in optimizer.param_groups
    ]


def _hint(message: str, samples: Columns | None, model: Module | None) -> str:
    """Return a hint about float64 samples: NumPy's default, which most models do not accept."""
    if samples is None or model is None or "double" not in message.lower():
        return ""
    if any(parameter.dtype == torch.float64 for parameter in model.parameters()):
        return ""
    double = [name for name, column in leaves(samples) if dtype_of(column) == np.float64]
    if not double:
        return ""
    return f"the model is not in float64: return {double[0]}.astype('float32') from samples()"


def _columns_text(samples: Columns) -> str:
    columns = []
    for name, column in leaves(samples):
        shape = column.flat.shape if isinstance(column, Ragged) else column.shape
        ragged_mark = "ragged " if isinstance(column, Ragged) else ""
        columns.append(f"{name} {ragged_mark}{dtype_of(column)}{list(shape)}")
    return ", ".join(columns)


def _differing(columns: Columns, other: Columns) -> str:
    """Return the first column in which two reads of the same samples differ, or an empty string."""
    other_leaves = dict(leaves(other))
    for name, column in leaves(columns):
        reread = other_leaves.get(name)
        if reread is None or _bytes(column) != _bytes(reread):
            return name
    return ""


def _bytes(column: NDArray[Any] | Ragged) -> tuple[bytes, ...]:
    if isinstance(column, Ragged):
        return column.flat.tobytes(), column.sizes.tobytes()
    return (column.tobytes(),)


def _list_text(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
