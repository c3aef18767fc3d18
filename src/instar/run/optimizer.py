"""Optimizers: parameter groups, a task's own, and their state as named tensors."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from instar.config.schema import OptimizerConfig
from instar.config.torch_optim.optimizers import OPTIMIZERS, OptimizerSpec, constructor_arguments
from instar.distributed.shards import distribute_like, is_dense, local_rows, to_local
from instar.growth.live.optimizers import adagrad_states
from instar.growth.plan import GrowthError
from instar.growth.states import is_growable
from instar.models.experts import expert_parameters
from instar.models.lora import is_adapter
from instar.run.muon import LANES, BatchedMuon, EagerMethods
from instar.run.rates import Update
from instar.schedule.settings import NewParamWarmup
from instar.tasks.task import Task


class TorchOptimizer(EagerMethods, Optimizer):
    """What optimizers of torch have here: they do without the compiler, and states that they lack begin late.

    They lack some where an operation or a resume has set what needs them, such as a momentum.
    """

    states: ClassVar[Mapping[str, str]] = {}
    """see `OptimizerSpec`"""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> Any:
        for parameter in group["params"]:
            if state := self.state.get(parameter):
                for name, needs in self.states.items():
                    if name not in state and (not needs or group[needs]):
                        state[name] = torch.zeros_like(parameter)
        of_torch: Any = super()
        return of_torch._init_group(group, *lists)


class Adagrad(torch.optim.Adagrad):
    """`torch.optim.Adagrad` whose states begin with a parameter's first step, as those of all others."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.state.clear()

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> Any:
        for parameter in group["params"]:
            if parameter.grad is not None and not self.state.get(parameter):
                self.state[parameter] = adagrad_states(group, parameter)
        of_torch: Any = super()
        return of_torch._init_group(group, *lists)


def _class_of(spec: OptimizerSpec) -> Callable[..., Optimizer]:
    base = Adagrad if spec.target == "Adagrad" else getattr(torch.optim, spec.target)
    step = torch.no_grad()(inspect.unwrap(base.step))
    names = {"step": step, "states": spec.states, "__module__": __name__, "__doc__": base.__doc__}
    return type(spec.target, (TorchOptimizer, base), names)


_CLASSES = {name: _class_of(spec) for name, spec in OPTIMIZERS.items() if name != "muon"}
_FUSED = ("adamw", "adam")
"""those of which one kernel updates all parameters: 3 to 7 times faster than foreach on a CPU"""


@dataclass(frozen=True)
class Group:
    """A parameter group: parameters with the same update, learning rate and weight decay."""

    update: str
    """a name of `OPTIMIZERS`"""
    names: tuple[str, ...]
    lr_ratio: float
    """learning rate of the group as a multiple of the settings' learning rate"""
    weight_decay: float


def group_parameters(shapes: Mapping[str, int], config: OptimizerConfig) -> tuple[Group, ...]:
    """Group parameters by name and number of dimensions.

    Muon updates the matrices inside blocks except adapters, and AdamW the rest. Vectors, and
    parameters that match a `no_decay` pattern, have no weight decay.

    Args:
        shapes: number of dimensions of each parameter, or of each expert's part of it, by name, in the model's
            order.
    """
    members: dict[tuple[str, float, float], list[str]] = {}
    for name, dimensions in shapes.items():
        # an adapter's factors have a low rank and should not be orthogonalised
        inside = name.startswith("blocks.") and not is_adapter(name)
        muon = config.name == "muon" and dimensions == 2 and inside
        exempt = dimensions < 2 or any(fnmatch(name, pattern) for pattern in config.no_decay)
        key = (
            "adamw" if config.name == "muon" and not muon else config.name,
            config.muon_lr / config.lr if muon else 1.0,
            0.0 if exempt else config.weight_decay or 0.0,
        )
        members.setdefault(key, []).append(name)
    return tuple(
        Group(update, tuple(names), lr_ratio, decay)
        for (update, lr_ratio, decay), names in members.items()
    )


def build_optimizers(
    parameters: Mapping[str, Parameter],
    config: OptimizerConfig,
    *,
    experts: frozenset[str] = frozenset(),
    elastic: bool = False,
    precision: str = "fp32",
) -> list[Optimizer]:
    """Build one optimizer per kind of update; groups have an `lr_ratio` and learning rate 0.

    Args:
        experts: parameters whose first dimension lists experts, each of which is updated as a parameter of its own.
        elastic: no bit of an update may depend on which rows of a parameter a rank holds.
        precision: of the forward pass. Muon orthogonalises in bf16 only where that is bf16.
    """
    shapes = {name: p.ndim - (name in experts) for name, p in parameters.items()}
    by_update: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for group in group_parameters(shapes, config):
        members = [parameters[name] for name in group.names]
        values = {"lr_ratio": group.lr_ratio, "weight_decay": group.weight_decay}
        for may_fuse, part in _by_kernel({"params": members, **values}, elastic=elastic):
            kernel = may_fuse or group.update not in _FUSED
            by_update.setdefault((group.update, kernel), []).append(part)
    return [
        _optimizer(update, groups, config, may_fuse=may_fuse, precision=precision)
        for (update, may_fuse), groups in by_update.items()
    ]


def _by_kernel(group: dict[str, Any], *, elastic: bool) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Yield the parts of a parameter group that the fused kernel may update, and that it may not."""
    members = group["params"]
    members = [members] if isinstance(members, Tensor) else [*members]
    kernels = [
        # torch also takes pairs of a name and a parameter
        _may_fuse(member[1] if isinstance(member, tuple) else member, elastic=elastic)
        for member in members
    ]
    for kernel in sorted({*kernels}, reverse=True):
        pairs = zip(members, kernels, strict=True)
        yield kernel, {**group, "params": [member for member, may in pairs if may is kernel]}


def _may_fuse(parameter: Tensor, *, elastic: bool) -> bool:
    """Return whether the fused AdamW may update a parameter.

    It walks memory, so that in a view with gaps it would change what lies between the elements. And it rounds the
    elements that remain at the end of a tensor differently: in an elastic run, any rows must fill vector registers.
    """
    even = parameter.ndim > 1 and math.prod(parameter.shape[1:]) % LANES == 0
    return is_dense(to_local(parameter)) and (even or not elastic)


def _optimizer(
    update: str,
    groups: list[dict[str, Any]],
    config: OptimizerConfig,
    *,
    may_fuse: bool = True,
    precision: str = "fp32",
) -> torch.optim.Optimizer:
    if update == "muon":
        return BatchedMuon(
            groups,
            # bfloat16 is 20 times as slow as float32 on a CPU with AVX2 only, and makes steps out of rounding errors
            dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
            momentum=config.momentum or 0.0,
            ns_steps=config.ns_steps,
            iteration=config.ns_iteration,
        )
    arguments = constructor_arguments(update, config.model_dump())
    if update in _FUSED:
        arguments["fused"] = may_fuse
    if update == "sgd":
        # the fused kernel fails where new parameters have no momentum yet
        arguments |= {"nesterov": config.nesterov, "foreach": True}
    return _CLASSES[update](groups, lr=0.0, **arguments)


def task_optimizers(
    task: Task,
    model: Module,
    config: OptimizerConfig,
    *,
    elastic: bool = False,
    precision: str = "fp32",
) -> list[Optimizer]:
    """Build the optimizers of a model: the task's own, or those of the config.

    The learning rates that the task gives are peak rates: their ratios to `config.lr` are kept, and
    the schedule and operations change all of them alike.

    Raises:
        ValueError: a parameter that is to be trained has no optimizer, or several.
    """
    parameters = dict(model.named_parameters())
    optimizer_or_several = task.optimizer(model)
    if optimizer_or_several is None:
        return build_optimizers(
            parameters,
            config,
            experts=expert_parameters(model),
            elastic=elastic,
            precision=precision,
        )
    optimizers = (
        list(optimizer_or_several)
        if isinstance(optimizer_or_several, Iterable)
        else [optimizer_or_several]
    )
    if optimizers and all(isinstance(group, dict) for group in optimizers):
        if config.name == "muon":
            raise ValueError(
                "optimizer() returned parameter groups, which optimizer.name muon makes"
            )
        optimizers = _of_groups(optimizers, config, elastic=elastic)
    elif not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        raise ValueError(
            "optimizer() must return an optimizer of torch, several, or parameter groups, not "
            f"{', '.join(type(optimizer).__name__ for optimizer in optimizers) or 'nothing'}"
        )
    elif config.follows_size:
        key = "lr_base_depth" if config.lr_base_width is None else "lr_base_width"
        raise ValueError(
            f"optimizer.{key} scales the rates of adamw, sgd and muon, and optimizer() returned an optimizer "
            f"of its own: return parameter groups, or leave {key} out"
        )
    check_covered(optimizers, parameters)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr_ratio"] = float(group.get("lr", config.lr)) / config.lr
    return optimizers


def _of_groups(
    groups: Iterable[Mapping[str, Any]], config: OptimizerConfig, *, elastic: bool
) -> list[Optimizer]:
    """Build the config's optimizers of parameter groups: one, or one for each kernel."""
    by_kernel: dict[bool, list[dict[str, Any]]] = {}
    for group in groups:
        for may_fuse, part in _by_kernel({"lr": config.lr, **group}, elastic=elastic):
            kernel = may_fuse or config.name not in _FUSED
            by_kernel.setdefault(kernel, []).append(part)
    return [
        _optimizer(config.name, parts, config, may_fuse=may_fuse)
        for may_fuse, parts in by_kernel.items()
    ]


def check_covered(optimizers: Iterable[Optimizer], parameters: Mapping[str, Parameter]) -> None:
    """Check that optimizers update each of a model's parameters once, and can.

    Raises:
        ValueError: they do not; names the parameter.
    """
    names = {parameter: name for name, parameter in parameters.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"] if group.get("fused") else ():
                if not is_dense(to_local(parameter)):
                    raise ValueError(
                        f"optimizer() returned a fused {type(optimizer).__name__}, and {names.get(parameter, 'one')} is "
                        "a view with gaps in memory, through which a fused kernel walks: say fused=False, or "
                        "make the parameter of a .clone()"
                    )
    counts = Counter(
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    for name, parameter in parameters.items():
        count = counts.pop(id(parameter), 0)
        if count > 1 or (parameter.requires_grad and not count):
            raise ValueError(
                f"optimizer() gives {name} to {count} optimizers or groups; each parameter of the "
                "model that requires a gradient belongs to one"
            )
    if counts:
        raise ValueError("optimizer() was given parameters that are not the model's")


def split_groups(
    optimizers: Iterable[Optimizer],
    parameters: Mapping[str, Parameter],
    warmups: Sequence[NewParamWarmup],
    factors: Callable[[Update], Mapping[str, float]],
) -> None:
    """Split parameter groups, so that all parameters of a group have one warm-up and one factor of their rate.

    Args:
        factors: returns the factor of the learning rate of each parameter, see `rate_factors`; missing: 1.
    """
    names = {parameter: name for name, parameter in parameters.items()}
    warmup_of = {name: warmup for warmup in warmups for name in warmup.names}
    for optimizer in optimizers:
        factor_of = factors(_update_of(optimizer))
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            members_by_key: dict[tuple[NewParamWarmup | None, float], list[Parameter]] = {}
            for parameter in group["params"]:
                key = warmup_of.get(names[parameter]), factor_of.get(names[parameter], 1.0)
                members_by_key.setdefault(key, []).append(parameter)
            for (warmup, factor), members in members_by_key.items():
                ratio = group["lr_ratio"] * factor
                groups.append({**group, "params": members, "birth": warmup, "lr_ratio": ratio})
        optimizer.param_groups[:] = groups


def _update_of(optimizer: Optimizer) -> Update:
    if isinstance(optimizer, BatchedMuon):
        return "muon"
    return "sgd" if isinstance(optimizer, torch.optim.SGD) else "adamw"


def set_learning_rate(optimizers: Sequence[Optimizer], lr: float, step: int) -> None:
    """Set the learning rate of every group for a step: `lr` × its `lr_ratio` × the factor of its warm-up."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            warmup: NewParamWarmup | None = group.get("birth")
            group["lr"] = lr * group["lr_ratio"] * (1.0 if warmup is None else warmup.factor(step))


OUTER_MOMENTUM = "outer_momentum"
"""Name of the state that belongs to the strategy, see `Rounds`."""
_NUMBER = ".number"
"""Suffix of a state that is a Python number, and a tensor without dimensions in a checkpoint."""


def optimizer_tensors(
    optimizers: Sequence[Optimizer], parameters: Mapping[str, Parameter]
) -> dict[str, Tensor]:
    """Return the optimizers' state tensors by name, `<parameter>/<state>`.

    Raises:
        ValueError: an optimizer has other state than tensors and numbers of parameters.
    """
    names: dict[object, str] = {parameter: name for name, parameter in parameters.items()}
    tensors: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else [("", state)]:
                name = f"{names.get(parameter, parameter)}/{key}"
                if isinstance(value, Tensor) and parameter in names:
                    tensors[name] = value
                elif isinstance(value, int | float) and parameter in names:
                    kind = torch.int64 if isinstance(value, int) else torch.float64
                    tensors[name + _NUMBER] = torch.tensor(value, dtype=kind)
                elif value is not None:
                    raise ValueError(
                        f"the state {name} of {type(optimizer).__name__} is a "
                        f"{type(value).__name__}; a checkpoint holds tensors and numbers that "
                        "belong to a parameter"
                    )
    return tensors


def load_optimizer_tensors(
    optimizers: Sequence[Optimizer],
    parameters: Mapping[str, Parameter],
    tensors: Mapping[str, Tensor],
) -> None:
    """Load state tensors that `optimizer_tensors` returned; those of an outer optimizer are ignored."""
    owner = {
        parameter: (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for key, tensor in tensors.items():
        name, _, field = key.rpartition("/")
        if field == OUTER_MOMENTUM:
            continue
        parameter = parameters[name]
        optimizer, group = owner[parameter]
        state = optimizer.state[parameter]
        if field.endswith(_NUMBER):
            state[field.removesuffix(_NUMBER)] = tensor.item()
            continue
        # torch's optimizers count steps on the CPU unless they are fused or capturable
        on_device = tensor.ndim or field != "step" or group.get("fused") or group.get("capturable")
        state[field] = distribute_like(
            tensor.to(parameter.device if on_device else "cpu"), parameter
        )


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the tensors' shapes by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_states(
    states: Mapping[str, tuple[int, ...]], parameters: Mapping[str, tuple[int, ...]]
) -> None:
    """Check the shapes of optimizer states, named ``<parameter>/<state>``.

    Raises:
        GrowthError: a state is neither a number nor of its parameter's shape, so that no plan says
            how it grows.
    """
    for name, shape in states.items():
        parameter, _, state = name.rpartition("/")
        of_parameter = parameters.get(parameter, ())
        if not is_growable(state, shape, of_parameter):
            raise GrowthError(
                f"cannot grow the optimizer state {name}: it is {list(shape)}, and its parameter "
                f"{list(of_parameter)}; states grow that have their parameter's shape, or with moments: reset"
            )


def check_names(targets: Mapping[str, object], names: Mapping[str, object]) -> None:
    """Raise ValueError unless both have the same keys."""
    if targets.keys() != names.keys():
        raise ValueError(f"names differ: {sorted(targets.keys() ^ names.keys())[:8]}")


def parameter_of(state: str) -> str:
    """Return the name of the parameter of an optimizer state, see `optimizer_tensors`."""
    return state.rpartition("/")[0]


def copy_tensors(targets: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy whole tensors in place by name, of sharded ones this rank's rows.

    Raises:
        ValueError: names or shapes differ.
    """
    check_names(targets, tensors)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if targets[name].shape != tensor.shape:
                raise ValueError(f"{name}: {tuple(tensor.shape)}, not {tuple(targets[name].shape)}")
            to_local(targets[name]).copy_(local_rows(tensor, targets[name]))
