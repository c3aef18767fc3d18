"""Metrics of a whole evaluation set, such as F1, AUROC or a rank correlation.

They are no means over samples. A metric is a `torchmetrics.Metric`, whose states are merged over
ranks, or a function of arrays that hold the inputs of all samples. Rank 0 computes the value.
"""

from __future__ import annotations

import math
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, cast

import safetensors.torch
import torch
from torch import Tensor, nn

from instar.distributed.agree import agree, gather_parts, raise_on_all_ranks
from instar.distributed.world import World
from instar.models.loss import at_least_float32

Inputs = Sequence[Tensor]
"""what a metric gets of a batch, e.g. predictions and targets"""
State = dict[str, list[Tensor]]
CPU = torch.device("cpu")

FEW_SAMPLES = 1024
"""largest evaluation set that rank 0 scores at once"""
FEWEST_IN_UPDATE = 64
"""samples of an update in larger ones: some metrics are NaN after an update with one sample"""


class SetMetric(ABC):
    """A metric of a whole evaluation set, on one rank; holds the inputs of all batches."""

    def __init__(self) -> None:
        self._batches: list[list[Tensor]] = []

    def add(self, inputs: Inputs) -> None:
        """Add a batch."""
        self._batches.append([tensor.cpu() for tensor in inputs])

    def finish(self) -> None:  # noqa: B027
        """Pass the batches that are still held to the metric, which may reject them."""

    def state(self) -> State:
        """Return what this rank has added; empty without a batch."""
        places = enumerate(zip(*self._batches, strict=True))
        return {str(place): list(tensors) for place, tensors in places}

    def merge(self, states: Sequence[State]) -> None:
        """Replace the state by the states of several ranks, in the order of their samples."""
        self._batches = [
            list(batch)
            for state in states
            for batch in zip(*(state[str(n)] for n in range(len(state))), strict=True)
        ]

    @abstractmethod
    def compute(self) -> object:
        """Return the value, after `finish`."""


def set_metrics(
    declare: Callable[[], Mapping[str, object]], device: torch.device, samples: int
) -> dict[str, SetMetric]:
    """Return what accumulates each metric that `declare` returns.

    Args:
        samples: of the evaluation set.

    Raises:
        TypeError: a metric is neither a `torchmetrics.Metric` nor a function.
    """
    metrics: dict[str, SetMetric] = {}
    with _quiet():
        declared_metrics = declare()
    # an object of torchmetrics exists only if its user has imported the library
    library: Any = sys.modules.get("torchmetrics")
    for name, metric in declared_metrics.items():
        if library is not None and isinstance(metric, library.Metric):
            has_few = samples <= FEW_SAMPLES
            metrics[name] = _AtOnce(metric) if has_few else _States(metric, device)
        elif callable(metric) and not isinstance(metric, nn.Module):
            metrics[name] = _Gathered(metric)
        else:
            hint = "; declare each of its metrics" if isinstance(metric, nn.ModuleDict) else ""
            raise TypeError(
                f"the metric {name} must be a torchmetrics.Metric or a function of arrays, not "
                f"{type(metric).__name__}{hint}"
            )
    return metrics


def compute(world: World, metrics: Mapping[str, SetMetric]) -> dict[str, float]:
    """Return the value of each metric over the batches of all ranks. A collective.

    The ranks' samples must be contiguous and in the order of ranks, and rank 0 must have some.
    """
    if not metrics:
        return {}
    if world.size > 1:
        _merge(world, metrics)
    values: dict[str, str] = {}
    with raise_on_all_ranks(world, "computing metrics"):
        if world.is_main:
            for name, metric in metrics.items():
                with _naming_errors(name):
                    metric.finish()
                    value = metric.compute()
                values[name] = repr(_number(name, value))
    # floats as text, because JSON has no NaN
    results = cast(dict[str, str], agree(world, values))
    return {name: float(value) for name, value in results.items()}


def _merge(world: World, metrics: Mapping[str, SetMetric]) -> None:
    """Merge the states of all ranks on rank 0. A collective."""
    part, rank_states = b"", dict[str, Tensor]()
    with raise_on_all_ranks(world, "collecting metrics"):
        for number, (name, metric) in enumerate(metrics.items()):
            with _naming_errors(name):
                state = metric.state()
            for key, tensors in state.items():
                for place, tensor in enumerate(tensors):
                    rank_states[f"{number}/{key}/{place}"] = tensor.cpu().contiguous().clone()
        part = safetensors.torch.save(rank_states)
    parts = gather_parts(world, part)
    with raise_on_all_ranks(world, "merging metrics"):
        all_tensors = [safetensors.torch.load(part) for part in parts]
        for number, metric in enumerate(metrics.values() if world.is_main else ()):
            states = [_of(tensors, str(number)) for tensors in all_tensors]
            metric.merge([state for state in states if state])


def update(metrics: Mapping[str, SetMetric], inputs: Mapping[str, Inputs]) -> None:
    """Add a batch to each metric.

    Raises:
        ValueError: a metric has no inputs or rejects them; names it.
    """
    for name in metrics.keys() ^ inputs.keys():
        raise ValueError(
            f"measure's {name} must be a tuple of the tensors that metrics()['{name}'] takes"
            if name in metrics
            else f"measure's {name} is a tuple, and metrics() declares no {name} that takes it"
        )
    for name, metric in metrics.items():
        for place, tensor in enumerate(tensors := inputs[name] or (None,)):
            if not isinstance(tensor, Tensor) or not tensor.ndim:
                raise ValueError(
                    f"measure's {name} must be a tuple of tensors [samples, …]; number {place + 1} of "
                    f"{len(tensors)} is of type {_value_text(tensor)}"
                )
        with _naming_errors(name):
            metric.add([at_least_float32(tensor.detach()) for tensor in inputs[name]])


def try_out(metrics: Mapping[str, SetMetric], inputs: Mapping[str, Inputs]) -> None:
    """Add a single batch, of which a value may or may not be computed.

    Raises:
        ValueError: a metric rejects its inputs, or its value is not one number.
    """
    update(metrics, inputs)
    for name, metric in metrics.items():
        with _naming_errors(name):
            metric.finish()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                value = metric.compute()
            except Exception:
                continue  # e.g. a batch with a single class
        _number(name, value)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(
            f"the metric {name} must be one number, not {_value_text(value)}: choose an average, or "
            "declare a metric for each value"
        ) from None


def _value_text(value: object) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + ("" if shape is None else f" {list(shape)}")


class _Gathered(SetMetric):
    """A function of the inputs of all samples, one NumPy array each."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self._function = function

    def compute(self) -> object:
        columns = [torch.cat(column).numpy() for column in zip(*self._batches, strict=True)]
        return self._function(*columns) if any(map(len, columns)) else math.nan


class _AtOnce(SetMetric):
    """A `torchmetrics.Metric` of a small set, updated with all samples at once."""

    def __init__(self, metric: Any, device: torch.device = CPU) -> None:
        super().__init__()
        self._metric = _prepare(metric, device)
        self._nan = torch.zeros((), dtype=torch.bool, device=device)
        """whether an input has NaN, which many metrics would rank or count like a number"""

    def finish(self) -> None:
        for inputs in _join_batches(self._batches):
            if any(map(len, inputs)):  # several metrics fail without a sample
                self._metric.update(*inputs)
                self._nan |= torch.stack([tensor.isnan().any() for tensor in inputs]).any()
        self._batches = []

    def compute(self) -> object:
        decides = hasattr(self._metric, "nan_strategy")
        if not _is_updated(self._metric) or (self._nan and not decides):
            return math.nan
        return self._metric.compute()


class _States(_AtOnce):
    """A `torchmetrics.Metric` whose states are merged."""

    def add(self, inputs: Inputs) -> None:
        self._batches.append([*inputs])
        if sum(len(batch[0]) for batch in self._batches) >= FEWEST_IN_UPDATE:
            self.finish()

    def state(self) -> State:
        self.finish()
        if not _is_updated(self._metric):
            return {}
        states = {
            f"{number}.{key}": [state] if isinstance(state, Tensor) else list(state)
            for number, part in enumerate(_parts(self._metric))
            for key, state in part.metric_state.items()
        }
        return {"nan": [self._nan], **states}

    def merge(self, states: Sequence[State]) -> None:
        if not states:
            return
        self._nan = torch.stack([flag for state in states for flag in state["nan"]]).any()
        for number, part in enumerate(_parts(self._metric)):
            part._update_count = max(1, part._update_count)  # rank 0 may have had no sample
            for key, state in part.metric_state.items():
                per_rank = [rank_state.get(f"{number}.{key}", []) for rank_state in states]
                tensors = [tensor.to(part.device) for of_rank in per_rank for tensor in of_rank]
                # as torchmetrics itself: lists are joined, tensors stacked and reduced
                reduce = part._reductions[key]
                if isinstance(state, list):
                    setattr(part, key, reduce(tensors) if reduce and tensors else tensors)
                elif len(tensors) == 1:
                    setattr(part, key, tensors[0])
                else:
                    stack = torch.stack(tensors)
                    setattr(part, key, stack if reduce is None else reduce(stack))


def _prepare(metric: Any, device: torch.device) -> Any:
    """Return the metric, empty and on the device. Its sums are in float64, so that they hardly depend
    on the number of batches and ranks."""
    metric.reset()
    metric = metric.to(device)
    for part in _parts(metric):
        # else `compute` would start a collective of its own, on rank 0 alone
        part.distributed_available_fn = _never
        for key, state in part.metric_state.items():
            if isinstance(state, Tensor) and state.is_floating_point():
                setattr(part, key, state.double())
    return metric


def _parts(metric: Any) -> list[Any]:
    """Return the metric and those that it is made of."""
    return [module for module in metric.modules() if hasattr(module, "metric_state")]


def _is_updated(metric: Any) -> bool:
    return any(part.update_called for part in _parts(metric))


def _never() -> bool:
    return False


def _join_batches(batches: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
    """Join consecutive batches whose samples have the same shapes."""
    for _, group in groupby(batches, lambda batch: [tensor.shape[1:] for tensor in batch]):
        yield [torch.cat(tensors) for tensors in zip(*group, strict=True)]


def _of(tensors: Mapping[str, Tensor], number: str) -> State:
    """Return the state of the metric of this number, from the tensors that a rank has sent."""
    state: State = {}
    # safetensors returns names in an order of its own
    for name in sorted(tensors, key=lambda name: int(name.rpartition("/")[2])):
        owner, key, _ = name.split("/")
        if owner == number:
            state.setdefault(key, []).append(tensors[name])
    return state


@contextmanager
def _naming_errors(name: str) -> Iterator[None]:
    """Context manager that names the metric in an error."""
    try:
        with _quiet():
            yield
    except Exception as error:
        raise ValueError(f"the metric {name} failed: {type(error).__name__}: {error}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager without torchmetrics' notes on the memory that a metric needs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Metric `\w+` will save all")
        yield
