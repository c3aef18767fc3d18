"""`grow`: an operation on a live model in anyone's loop, with its optimizer and its moving average.

The grown model is built and proved beside the old one. Only then the old module takes over the parts of the new
one, so that all that holds the module or the optimizer keeps working: a failure before leaves both as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from instar.config.sections import Operation
from instar.growth.engine import prepare_candidate
from instar.growth.live.build import Wrap, renew
from instar.growth.live.growing import Ema, GrowthRequest, home_of, live_growth
from instar.growth.live.subject import Build, shape_of, subject_of
from instar.growth.live.vocabulary import with_vocabulary
from instar.growth.operators import plan
from instar.growth.peers import Peers, peers_of
from instar.growth.plan import GrowthError, GrowthPlan
from instar.growth.proof import Proof
from instar.models.shape import Growable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedGrowth:
    """A grown model that is not in use yet.

    Where an operation makes a model of another class, as `upcycle` makes a Mixtral of a Llama, `model` is all that there
    is: the old module cannot become it.
    """

    operation: Operation
    shape: Growable
    plan: GrowthPlan
    proof: Proof | None
    """how far the operation changes the model's outputs; None without a probe"""
    model: Module
    """the grown model, without wrappers"""
    _commit: Callable[[], Module]

    def swap_in(self) -> Module:
        """Make the old module the grown model, and its optimizer and moving average those of it."""
        return self._commit()


def grow(
    model: Module,
    operation: str | Operation | Mapping[str, Any],
    value: Any = None,
    *,
    optimizer: Optimizer | Iterable[Optimizer] = (),
    ema: Ema | None = None,
    probe: Any = None,
    shape: Growable | None = None,
    build: Build | None = None,
    wrap: Wrap | None = None,
    seed: int = 0,
    allow_inexact: bool = False,
    **options: Any,
) -> Module:
    """Grow a model between two steps, with its optimizer's state.

    ``grow(model, "widen_mlp", "x2", how="split", optimizer=optimizer)``: operations, values and options are those
    of a schedule (docs/schedule.md). The module stays the same object, with its hooks, modes, devices and dtypes;
    gradients are dropped. Pass it with its wrappers, which stay the same objects too: one of `torch.compile` compiles
    again at its next call; DDP is made to reduce the new gradients, if every process calls `grow` alike.

    Args:
        operation: a name, an `Operation`, or an entry of a schedule.
        optimizer: one or several; their groups and states are changed in place. Schedulers are not touched.
        ema: moving average of the parameters: a module like the model, or tensors by the names of its parameters.
        probe: a batch, on which the outputs before and after are compared: arguments of the model by name, a tuple
            of them, or its first argument; False: no comparison. By default a few drawn tokens for a model of transformers, else
            none.
        shape: of a module of your own; default: its attribute `shape`.
        build: returns a new module of a larger shape; default: the class of the model.
        wrap: applies `fully_shard` to a module, as it was applied to the old one. A new module is returned, without the old
            one's hooks. A collective: every process calls it alike.
        seed: of new values; every process of a run must give the same.
        allow_inexact: accept a model that breaks the label of the operation.

    Raises:
        GrowthError: the operation is not possible, or changed the outputs more than its label allows. Model and
            optimizer are as before.
    """
    subjects = _operation(operation, value, options), optimizers_of(optimizer)
    request = GrowthRequest(*subjects, ema, probe, shape, build, wrap, seed, allow_inexact)
    return prepare_with(peers_of(model), model, request).swap_in()


def prepare(
    model: Module,
    operation: str | Operation | Mapping[str, Any],
    value: Any = None,
    *,
    optimizer: Optimizer | Iterable[Optimizer] = (),
    ema: Ema | None = None,
    probe: Any = None,
    shape: Growable | None = None,
    build: Build | None = None,
    wrap: Wrap | None = None,
    seed: int = 0,
    allow_inexact: bool = False,
    **options: Any,
) -> PreparedGrowth:
    """Build and prove what `grow` would make of a model, which is not changed; same arguments."""
    subjects = _operation(operation, value, options), optimizers_of(optimizer)
    request = GrowthRequest(*subjects, ema, probe, shape, build, wrap, seed, allow_inexact)
    return prepare_with(peers_of(model), model, request)


def optimizers_of(optimizer: Optimizer | Iterable[Optimizer]) -> tuple[Optimizer, ...]:
    """Return one or several optimizers as several."""
    return (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)


def prepare_with(peers: Peers, model: Module, request: GrowthRequest) -> PreparedGrowth:
    """Do the same as `prepare` together with peers, which the wrappers of the model may not show."""
    with peers.phase():
        growing = live_growth(model, request, peers)
    name, step = request.operation.name, growing.step
    growth = prepare_candidate(
        growing,
        step.plan,
        peers,
        compares=growing.batch is not None,
        allow_inexact=request.allow_inexact,
    )
    module = growth.candidate
    if growth.proof is not None:
        logger.info("%s: %s", name, growth.proof)

    def commit() -> Module:
        if type(module) is not type(growing.old.module):
            raise GrowthError(
                f"{name}: a {type(growing.old.module).__name__} cannot become a {type(module).__name__} in place; "
                f"prepare(model, {name!r}, …).model is a new one, for a new optimizer"
            )
        growth.commit()
        if request.wrap is None:
            renew(model)
        return model if request.wrap is None else module

    return PreparedGrowth(
        request.operation, growing.new.shape, step.plan, growth.proof, module, commit
    )


def plan_growth(
    model: Any,
    operation: str | Operation | Mapping[str, Any],
    value: Any = None,
    *,
    shape: Growable | None = None,
    **options: Any,
) -> tuple[Growable, GrowthPlan]:
    """Return the grown shape and the plan of every tensor, as data.

    Args:
        model: a module, or the config of a model of transformers, also as a dict.

    Raises:
        GrowthError: the operation is not possible for this model.
    """
    if shape is None:
        shape = subject_of(model).shape if isinstance(model, Module) else shape_of(model)
    return plan(shape, with_vocabulary(_operation(operation, value, options), home_of(model)))


def _operation(
    operation: str | Operation | Mapping[str, Any], value: Any, options: Mapping[str, Any]
) -> Operation:
    if isinstance(operation, str):
        return Operation(operation, value, dict(options))
    if isinstance(operation, Mapping):
        entry = dict(operation)
        operation = Operation(entry.pop("name"), entry.pop("value", None), entry)
    if value is not None or options:
        raise TypeError("value and options belong to the name of an operation")
    return operation
