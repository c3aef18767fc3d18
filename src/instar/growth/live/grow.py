"""`grow`: an operation on a live model in anyone's loop, with its optimizer and its moving average.

The grown model is built and proved beside the old one. Only then the old module takes over the parts of the new
one, so that all that holds the module or the optimizer keeps working: a failure before leaves both as they were.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from instar.config.sections import Operation
from instar.distributed.shards import Wholes, is_sharded, laid_out
from instar.growth.apply import Key, Role, applied, grow_buffers, moments_mode
from instar.growth.axes import Use
from instar.growth.folders import check_own_family
from instar.growth.live.build import Wrap, build_sharded, build_whole
from instar.growth.live.modules import renew, take_over
from instar.growth.live.optimizers import Companion, prepare_optimizer
from instar.growth.live.peers import peers_of
from instar.growth.live.probe import drawn, moved, probed, reshard
from instar.growth.live.subject import Build, Subject, bare, shape_of, subject_of
from instar.growth.live.vocabulary import with_vocabulary
from instar.growth.operators import plan
from instar.growth.plan import Fresh, Grown, GrowthError, GrowthPlan, New, VocabularyMap
from instar.growth.proof import (
    Doubled,
    Peers,
    Proof,
    prove,
    verify_parameters,
    verify_rounded,
)
from instar.models.hf.pretrained import PretrainedShape
from instar.models.module import load_buffers, persistent_buffers
from instar.models.shape import Growable, streams_of

logger = logging.getLogger(__name__)

Ema = Module | MutableMapping[str, Tensor]


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
        """Makes the old module the grown model, and its optimizer and moving average those of it."""
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
    """Grows a model between two steps, with its optimizer's state.

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
    found = prepare(
        model,
        operation,
        value,
        optimizer=optimizer,
        ema=ema,
        probe=probe,
        shape=shape,
        build=build,
        wrap=wrap,
        seed=seed,
        allow_inexact=allow_inexact,
        **options,
    )
    return found.swap_in()


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
    """Builds and proves what `grow` would make of a model, which is not changed; same arguments."""
    return prepare_with(
        peers_of(model),
        model,
        operation,
        value,
        optimizer=optimizer,
        ema=ema,
        probe=probe,
        shape=shape,
        build=build,
        wrap=wrap,
        seed=seed,
        allow_inexact=allow_inexact,
        **options,
    )


def prepare_with(
    peers: Peers,
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
    """Does the same together with peers, which the wrappers of the model may not show."""
    asked = _operation(operation, value, options)
    with peers.phase():
        reshard(model)
        subject = subject_of(model, shape, build)
        exact = with_vocabulary(asked, _home(subject.module))
        larger, made = plan(subject.shape, exact)
        check_own_family(subject.shape, [exact])
        key = (seed, sum(p.numel() for p in subject.module.parameters()))
        old = subject.parameters()
        if wrap is None and any(map(is_sharded, old.values())):
            raise GrowthError(
                "the parameters are sharded (FSDP): call grow with wrap=, the function that applies fully_shard to the module"
            )
    module = _built(subject, larger, made, key, wrap, peers)
    new = replace(subject, shape=larger).parameters(module)
    proof = _prove(subject, asked, module, larger, made, key, probe, wrap, peers)
    if proof is not None:
        logger.info("%s: %s", asked.name, proof)
        if not proof.holds and not allow_inexact:
            raise GrowthError(
                f"{asked.name}: the outputs changed by {proof.max_logit_diff_relative:.2g} of the largest, more than "
                f"its label {proof.label!r} allows; the model is as before (allow_inexact=True accepts it)"
            )
    verify_parameters(made, old, new, key, peers)
    with peers.phase():
        planned = grow_buffers(made, persistent_buffers(subject.module), module)
        verify_rounded(made, persistent_buffers(module), planned)
        _warn_if_frozen(asked.name, larger, made, new)
        mode = moments_mode(asked)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        named = subject.names(), replace(subject, shape=larger).names(module)
        beside = [prepare_optimizer(each, made, old, new, key, mode, named) for each in optimizers]
        if ema is not None:
            beside.append(_prepare_ema(ema, subject, larger, made, key, new, wrap))
    for companion in beside:
        companion.verify(peers)

    def commit() -> Module:
        if type(module) is not type(subject.module):
            raise GrowthError(
                f"{asked.name}: a {type(subject.module).__name__} cannot become a {type(module).__name__} in place; "
                f"prepare(model, {asked.name!r}, …).model is a new one, for a new optimizer"
            )
        for parameter in (*old.values(), *new.values()):
            parameter.grad = None
        for companion in beside:
            companion.commit()
        _set_special_ids(module if wrap else subject.module, exact)
        if wrap is not None:
            return module
        take_over(subject.module, module)
        renew(model)
        return model

    return PreparedGrowth(asked, larger, made, proof, module, commit)


def plan_growth(
    model: Any,
    operation: str | Operation | Mapping[str, Any],
    value: Any = None,
    *,
    shape: Growable | None = None,
    **options: Any,
) -> tuple[Growable, GrowthPlan]:
    """Returns the grown shape and the plan of every tensor, as data.

    Args:
        model: a module, or the config of a model of transformers, also as a dict.

    Raises:
        GrowthError: the operation is not possible for this model.
    """
    if shape is None:
        shape = subject_of(model).shape if isinstance(model, Module) else shape_of(model)
    return plan(shape, with_vocabulary(_operation(operation, value, options), _home(model)))


def _home(model: Any) -> Path | None:
    """Returns the folder that a model was loaded from, where its tokenizer may be."""
    name = getattr(model, "name_or_path", "")
    return Path(name) if isinstance(name, str) and name else None


def _set_special_ids(module: Module, operation: Operation) -> None:
    """Gives the settings of generation the ids of a new tokenizer."""
    settings: Any = getattr(module, "generation_config", None)
    if isinstance(operation.value, VocabularyMap) and settings is not None:
        for key, value in operation.value.special_ids(settings.to_dict()).items():
            setattr(settings, key, value)


def _operation(
    given: str | Operation | Mapping[str, Any], value: Any, options: Mapping[str, Any]
) -> Operation:
    if isinstance(given, str):
        return Operation(given, value, dict(options))
    if isinstance(given, Mapping):
        entry = dict(given)
        given = Operation(entry.pop("name"), entry.pop("value", None), entry)
    if value is not None or options:
        raise TypeError("value and options belong to the name of an operation")
    return given


def _built(
    subject: Subject, larger: Growable, made: GrowthPlan, key: Key, wrap: Wrap | None, peers: Peers
) -> Module:
    if wrap is not None:
        return build_sharded(subject, larger, made, key, wrap, peers)
    with peers.phase():
        return build_whole(subject, larger, made, key)


def _prepare_ema(
    ema: Ema,
    subject: Subject,
    larger: Growable,
    made: GrowthPlan,
    key: Key,
    parameters: Mapping[str, Parameter],
    wrap: Wrap | None,
) -> Companion:
    """Returns a moving average's part of a growth, for a grown model of these parameters."""
    if isinstance(ema, Module):
        if wrap is not None:
            raise GrowthError(
                "with wrap=, ema= takes tensors by the names of parameters, no module"
            )
        old = replace(subject, module=bare(ema))
        if old.parameters().keys() != subject.parameters().keys():
            raise GrowthError("the moving average has other parameters than the model")
        new = build_whole(old, larger, made, key)
        averages = old.parameters(), replace(old, shape=larger).parameters(new)
        return Companion(
            lambda peers: verify_parameters(made, *averages, key, peers),
            lambda: take_over(old.module, new),
        )
    tensors = {subject.name(name): tensor for name, tensor in ema.items()}
    if odd := tensors.keys() ^ subject.parameters().keys():
        raise GrowthError(f"the moving average has other names than the model: {min(odd)}")
    made_of = applied(made, Wholes(tensors), Role.PARAMETER, key)
    grown = {name: laid_out(tensor, parameters[name]) for name, tensor in made_of}

    def commit() -> None:
        ema.clear()
        ema.update({subject.module_name(name): tensor for name, tensor in grown.items()})

    return Companion(lambda peers: verify_parameters(made, tensors, grown, key, peers), commit)


def _warn_if_frozen(
    operation: str, larger: Growable, made: GrowthPlan, parameters: Mapping[str, Parameter]
) -> None:
    """Warns if all tensors that read what is new, or add it to a residual stream, are zero there and frozen."""
    table, streams = larger.parameters(), streams_of(larger)
    zeros = [
        name
        for name, tensor in made.tensors.items()
        if (isinstance(tensor, Fresh) and tensor.fill == "zero" and table[name].writes in streams)
        or (
            isinstance(tensor, Grown)
            and any(
                isinstance(piece, New) and piece.fill == "zero"
                for edit in tensor.edits
                if Use(name, table[name], edit.dim).relation == "reads"
                for piece in edit.pieces
            )
        )
    ]
    trains = any(parameter.requires_grad for parameter in parameters.values())
    if trains and zeros and not any(parameters[name].requires_grad for name in zeros):
        logger.warning(
            "%s: what is new does not train: %s and its like are zero there, and frozen; unfreeze them, or give them "
            "adapters",
            operation,
            zeros[0],
        )


def _prove(
    subject: Subject,
    operation: Operation,
    module: Module,
    larger: Growable,
    made: GrowthPlan,
    key: Key,
    batch: Any,
    wrap: Wrap | None,
    peers: Peers,
) -> Proof | None:
    if batch is False:
        return None
    if batch is None:
        if not isinstance(subject.shape, PretrainedShape):
            return None
        assert isinstance(larger, PretrainedShape)
        batch = drawn(subject.shape, larger)
    device = next(module.parameters()).device
    batch = moved(batch, device)

    def doubled() -> Doubled | None:
        try:
            old, wrap_64 = _doubled(subject, key, wrap, peers)
            new = _filled_in_double(old, module, larger, made, key, wrap_64, peers)
            batch_64 = moved(batch, device, torch.float64)
            before, after = probed(old.module, batch_64), probed(new, batch_64)
        except GrowthError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            logger.info("%s is not compared in float64: %s", operation.name, error)
            return None
        # rounding is that of what models compute in float32
        return Doubled(before, after, torch.float32, _tensors(subject, larger, new))

    return prove(
        made,
        lambda: (probed(subject.module, batch), probed(module, batch)),
        {p.dtype for p in module.parameters()},
        tensors=_tensors(subject, larger, module),
        doubled=doubled,
        peers=peers,
    )


def _tensors(subject: Subject, larger: Growable, module: Module) -> dict[str, Tensor]:
    """Returns the parameters, by their names in the shape, and the persistent buffers of a grown module."""
    parameters = replace(subject, shape=larger).parameters(module)
    return {**parameters, **persistent_buffers(module)}


def _doubled(
    subject: Subject, key: Key, wrap: Wrap | None, peers: Peers
) -> tuple[Subject, Wrap | None]:
    """Returns a subject in float64, and what shards others of that type."""
    if wrap is None:
        return replace(subject, module=copy.deepcopy(subject.module).double()), None

    def wrap_doubled(module: Module) -> None:
        wrap(module.double())

    same = GrowthPlan({name: Grown(name) for name in subject.parameters()}, "exact")
    module = build_sharded(subject, subject.shape, same, key, wrap_doubled, peers)
    return replace(subject, module=module), wrap_doubled


def _filled_in_double(
    old: Subject,
    module: Module,
    larger: Growable,
    made: GrowthPlan,
    key: Key,
    wrap: Wrap | None,
    peers: Peers,
) -> Module:
    """Returns a grown module in float64, made of the old one in float64: if whole, a copy of `module` with other
    tensors."""
    if wrap is not None:
        return build_sharded(old, larger, made, key, wrap, peers)
    new = copy.deepcopy(module).double()
    parameters = replace(old, shape=larger).parameters(new)
    detached = {name: parameter.detach() for name, parameter in old.parameters().items()}
    with torch.no_grad():
        for name, tensor in applied(made, detached, Role.PARAMETER, key):
            parameters[name].copy_(tensor)
    load_buffers(new, grow_buffers(made, persistent_buffers(old.module), new))
    return new
