"""Running a custom task: calls the user's object, and checks what it returns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from instar.data.columns import Columns
from instar.distributed.failure import exits_fail
from instar.models.loss import at_least_float32
from instar.tasks.custom import CustomTask
from instar.tasks.custom_spec import CustomSpec, build_module, kind_of, name_of
from instar.tasks.task import Batch, Measured, Tally, Task


class UserTask(Task):
    """`Task` of a `CustomTask`: calls it, and checks what it returns."""

    spec: CustomSpec

    @property
    def custom_task(self) -> CustomTask[Any, Any]:
        """The user's object."""
        return self.spec.custom_task

    @property
    def random(self) -> bool:
        """Always true: a user's model may draw, so generators are seeded for every micro-batch."""
        return True

    def shell(self) -> nn.Module:
        return build_module(self.custom_task, self.architecture, self.config.seed)

    def optimizer(self, model: nn.Module) -> Any:
        with exits_fail(f"{name_of(self.custom_task)}.optimizer"):
            return self.custom_task.optimizer(model, self.config.optimizer)

    def lr_share(self, step: int, end: int | None) -> float | None:
        with exits_fail(f"{name_of(self.custom_task)}.schedule"):
            share = self.custom_task.schedule(step, end)
        if share is None or (isinstance(share, int | float) and 0.0 <= share < math.inf):
            return share
        raise ValueError(
            f"{name_of(self.custom_task)}.schedule must return a share of the learning rate, at least 0, not "
            f"{share!r} at step {step}"
        )

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return at_least_float32(self._losses(model, batch, self._collate(batch))[0]).sum()

    def hooks(self) -> Sequence[object]:
        return (self.custom_task,)

    def set_metrics(self) -> Mapping[str, Any]:
        with exits_fail(f"{name_of(self.custom_task)}.metrics"):
            metrics: object = self.custom_task.metrics()
        if not isinstance(metrics, Mapping):
            raise ValueError(
                f"{name_of(self.custom_task)}.metrics must return metrics by name, not {kind_of(metrics)}"
            )
        if unknown := metrics.keys() - self.custom_task.better.keys():
            raise ValueError(
                f"{name_of(self.custom_task)}.better must name {', '.join(sorted(unknown))} of metrics() too, "
                "and whether max or min is better"
            )
        return metrics

    def measure(self, model: nn.Module, batch: Batch, *, predict: bool = False) -> Measured:
        user_batch = self._collate(batch)
        losses, outputs = self._losses(model, batch, user_batch)
        with exits_fail(f"{name_of(self.custom_task)}.measure"):
            result = self.custom_task.measure(outputs, user_batch)
        if not isinstance(result, Mapping):
            raise ValueError(
                f"{name_of(self.custom_task)}.measure must return tensors by name, not {kind_of(result)}"
            )
        values = {"loss": losses, **result}
        if missing := [name for name in self.custom_task.better if name not in values]:
            raise ValueError(f"{name_of(self.custom_task)}.measure gave no {', '.join(missing)}")
        inputs = {
            name: values[name]
            for name in self.custom_task.better
            if isinstance(values[name], tuple)
        }
        tallies, weights = {}, torch.ones_like(losses)
        for name in self.metrics:
            if name not in inputs:
                self._check_each(f"measure's {name}", values[name], batch)
                tallies[name] = Tally(values[name], weights)
        predictions = self._predictions(outputs, batch, user_batch) if predict else {}
        return Measured(tallies, inputs, predictions)

    def _predictions(self, outputs: Any, batch: Batch, user_batch: Any) -> Columns:
        with exits_fail(f"{name_of(self.custom_task)}.predict"):
            predictions = self.custom_task.predict(outputs, user_batch)
        if not isinstance(predictions, Mapping):
            raise ValueError(
                f"{name_of(self.custom_task)}.predict must return tensors by name, not {kind_of(predictions)}"
            )
        for name, values in predictions.items():
            first = values[:, 0] if isinstance(values, Tensor) and values.ndim == 2 else values
            self._check_each(f"predict's {name}", first, batch)
        return {name: _numbers(values) for name, values in predictions.items()}

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        with exits_fail(f"{name_of(self.custom_task)}.outputs"):
            outputs: object = self.custom_task.outputs(model, self._collate(batch))
        if not (
            isinstance(outputs, Tensor)
            and outputs.is_floating_point()
            and outputs.ndim
            and outputs.numel()
        ):
            raise ValueError(
                f"{name_of(self.custom_task)}.outputs must return one tensor of floating-point numbers, by "
                f"which growth is checked, not {kind_of(outputs)}; where the model returns something "
                "else, define outputs(self, model, batch), e.g. return model(batch['x'])[0]"
            )
        return outputs

    def _collate(self, batch: Batch) -> Any:
        """Return what the user's `collate` makes of a batch; the batch itself without one."""
        if type(self.custom_task).collate is CustomTask.collate:
            return batch
        with exits_fail(f"{name_of(self.custom_task)}.collate"):
            return self.custom_task.collate(_split_samples(batch))

    def _losses(self, model: nn.Module, batch: Batch, user_batch: Any) -> tuple[Tensor, Any]:
        """Return the losses, and what `measure` and `predict` get: outputs, or the model."""
        with exits_fail(f"{name_of(self.custom_task)}.loss"):
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
                f"{name_of(self.custom_task)}.{what} must be a tensor [samples], one value for each of "
                f"{samples}, not {kind_of(values)}{hint}"
            )
        if values.shape != (samples,):
            hint = ": say reduction='none'" if what == "loss" else ""
            if values.ndim > 1 and len(values) == samples:
                hint = ": take the mean over the other axes, e.g. .flatten(1).mean(1)"
            raise ValueError(
                f"{name_of(self.custom_task)}.{what} must be [samples], one for each of {samples}, not "
                f"{list(values.shape)}{hint}"
            )


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
