"""`grow`: an operation on a live model in anyone's loop, with its optimizer and its moving average.

The grown model is built and proved beside the old one. Only then the old module takes over the parts of the new
one, so that all that holds the module or the optimizer keeps working: a failure before leaves both as they were.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from instar.config.sections import Operation
from instar.distributed.shards import is_sharded
from instar.growth.apply import (
    STAY_EQUAL,
    GrowthStep,
    copies_stay_equal,
    grow_buffers,
    moments_mode,
)
from instar.growth.attributes import build_reference
from instar.growth.axes import Use
from instar.growth.engine import (
    GrownPart,
    fill_buffers,
    fill_parameters,
    grow_average,
    prepare_candidate,
)
from instar.growth.folders import check_own_family
from instar.growth.live.build import (
    Wrap,
    attributes_of,
    build_sharded,
    build_unfilled,
    build_whole,
    renew,
    take_over,
)
from instar.growth.live.optimizers import check_holds, prepare_optimizer, tensor_states
from instar.growth.live.probe import batch_to_device, draw_probe, reshard, run_probe
from instar.growth.live.subject import Build, Subject, bare, shape_of, subject_of
from instar.growth.live.vocabulary import with_vocabulary
from instar.growth.operators import plan
from instar.growth.peers import Peers, peers_of
from instar.growth.plan import Fresh, Grown, GrowthError, GrowthPlan, New, VocabularyMap
from instar.growth.proof import Doubled, Probe, Proof, verify_parameters, verify_rounded
from instar.models.hf.pretrained import PretrainedShape
from instar.models.lora import is_adapter
from instar.models.module import persistent_buffers
from instar.models.shape import Growable, streams_of

logger = logging.getLogger(__name__)

Ema = Module | MutableMapping[str, Tensor]

NO_MASKS = "masks open, and are folded, by the steps of instar train, which this loop does not count: leave mask out"


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
    refusal: str = ""
    """why the old module cannot become it; empty: it can"""

    def swap_in(self) -> Module:
        """Make the old module the grown model, and its optimizer and moving average those of it.

        Raises:
            GrowthError: `refusal`.
        """
        if self.refusal:
            raise GrowthError(self.refusal)
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
            none, with a warning.
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
    reference = growing.old.reference
    reference = reference.if_on_all(peers.all_agree(reference.module is not None))
    growing = replace(growing, old=replace(growing.old, reference=reference))
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
    elif request.probe is None and step.plan.label != "lossy":
        logger.warning(
            "%s: nothing shows that it is %s: pass probe=, a batch on which the outputs before and after are compared "
            "(False: no comparison)",
            name,
            step.plan.label,
        )

    old_class, new_class = type(growing.old.module), type(module)
    refusal = (
        f"{name}: a {old_class.__name__} cannot become a {new_class.__name__} in place; "
        f"prepare(model, {name!r}, …).model is a new one, for a new optimizer"
    )

    def commit() -> Module:
        growth.commit()
        if request.wrap is None:
            renew(model)
        return model if request.wrap is None else module

    return PreparedGrowth(
        request.operation,
        growing.new.shape,
        step.plan,
        growth.proof,
        module,
        commit,
        "" if old_class is new_class else refusal,
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


@dataclass(frozen=True)
class GrowthRequest:
    """What to do to a model, with what it is trained by: arguments of `grow`."""

    operation: Operation
    optimizers: Sequence[Optimizer] = ()
    ema: Ema | None = None
    probe: Any = None
    shape: Growable | None = None
    build: Build | None = None
    wrap: Wrap | None = None
    seed: int = 0
    allow_inexact: bool = False
    refuses: Callable[[Growable], str] = lambda _: ""
    """why a grown shape is not wanted; empty: it is"""
    replays: bool = False
    """of a history: the states of the grown model are loaded afterwards"""


def live_growth(model: Module, request: GrowthRequest, peers: Peers) -> LiveGrowth:
    """Return what grows. Does not communicate."""
    if "mask" in request.operation.options or request.operation.name == "fold_masks":
        raise GrowthError(f"{request.operation.name}: {NO_MASKS}")
    reshard(model)
    old = subject_of(model, request.shape, request.build)
    exact = with_vocabulary(request.operation, home_of(old.module))
    larger, growth_plan = plan(old.shape, exact)
    if why := request.refuses(larger):
        raise GrowthError(f"{request.operation.name}: {why}")
    check_own_family(old.shape, [exact])
    if request.wrap is None and any(map(is_sharded, old.module.parameters())):
        raise GrowthError(
            "the parameters are sharded (FSDP): call grow with wrap=, the function that applies fully_shard to the module"
        )
    key = (request.seed, sum(p.numel() for p in old.module.parameters()))
    step = GrowthStep(growth_plan, larger.parameters(), key, moments_mode(request.operation))
    batch = request.probe
    if batch is None and isinstance(old.shape, PretrainedShape):
        assert isinstance(larger, PretrainedShape)
        batch = draw_probe(old.shape, larger)
    device = next(old.module.parameters()).device
    batch = None if batch is None or batch is False else batch_to_device(batch, device)
    old = replace(old, reference=build_reference(partial(build_unfilled, old, old.shape)))
    return LiveGrowth(request, exact, old, replace(old, shape=larger), step, peers, batch)


def home_of(model: Any) -> Path | None:
    """Return the folder that a model was loaded from, where its tokenizer may be."""
    name = getattr(model, "name_or_path", "")
    return Path(name) if isinstance(name, str) and name else None


@dataclass(frozen=True)
class LiveGrowth:
    """A module in anybody's loop, whole on each process, or in parts on all of them: see `GrowthSubject`."""

    request: GrowthRequest
    exact: Operation
    """with the vocabulary read"""
    old: Subject
    new: Subject
    """the old module with the grown shape"""
    step: GrowthStep
    peers: Peers
    batch: Any
    """on the module's device; None: outputs are not compared"""

    @property
    def name(self) -> str:
        return self.request.operation.name

    def build(self) -> Module:
        return self._build(self.old, self.request.wrap)

    def _build(self, old: Subject, wrap: Wrap | None) -> Module:
        if wrap is not None:
            return build_sharded(old, self.new.shape, self.step, wrap, self.peers)
        with self.peers.phase():
            return build_whole(old, self.new.shape, self.step)

    def tensors(self, candidate: Module) -> Mapping[str, Tensor]:
        return {**self.new.parameters(candidate), **persistent_buffers(candidate)}

    def dtypes(self, candidate: Module) -> Collection[torch.dtype]:
        return {parameter.dtype for parameter in candidate.parameters()}

    def outputs(self, candidate: Module) -> tuple[Probe, Probe]:
        return run_probe(self.old.module, self.batch), run_probe(candidate, self.batch)

    def in_double(self, candidate: Module) -> Doubled:
        if (wrap := self.request.wrap) is None:
            with self.peers.phase():
                old = replace(self.old, module=copy.deepcopy(self.old.module).double())
                # a copy, which has the modes and hooks of the candidate
                new = copy.deepcopy(candidate).double()
            fill_parameters(self.step, old.parameters(), self.new.parameters(new), self.peers)
            with self.peers.phase():
                fill_buffers(self.step.plan, old.module, new)
        else:

            def wrap_doubled(module: Module) -> None:
                wrap(module.double())

            same = GrowthPlan({name: Grown(name) for name in self.old.parameters()}, "exact")
            step = replace(self.step, plan=same)
            module = build_sharded(self.old, self.old.shape, step, wrap_doubled, self.peers)
            old = replace(self.old, module=module)
            new = self._build(old, wrap_doubled)
        batch = batch_to_device(self.batch, next(candidate.parameters()).device, torch.float64)
        before, after = run_probe(old.module, batch), run_probe(new, batch)
        # rounding is that of what models compute in float32
        return Doubled(before, after, torch.float32, self.tensors(new))

    def broken(self, proof: Proof) -> Exception:
        return GrowthError(
            f"{self.name}: the outputs changed by {proof.max_logit_diff_relative:.2g} of the largest, more than "
            f"its label {proof.label!r} allows; the model is as before (allow_inexact=True accepts it)"
        )

    def parts(self, candidate: Module) -> Sequence[GrownPart]:
        old, new = self.old.parameters(), self.new.parameters(candidate)
        name_maps = self.old.names(), self.new.names(candidate)
        with self.peers.phase():
            check_holds(self.request.optimizers, old)
            _warn_if_frozen(self.name, self.new.shape, self.step.plan, new)
            if text := attributes_of(self.old, candidate, self.step.plan).warning:
                logger.warning("%s: %s", self.name, text)
            states = tensor_states(self.request.optimizers, old)
            stay_equal = copies_stay_equal(self.step.plan, states, self.step.mode)
            if stay_equal and not self.request.replays:
                logger.warning("the copies that %s made %s", self.name, STAY_EQUAL)
        parts = [
            prepare_optimizer(optimizer, self.step, old, new, name_maps, self.peers)
            for optimizer in self.request.optimizers
        ]
        if isinstance(self.request.ema, Module):
            parts.append(self._average_module(self.request.ema))
        elif self.request.ema is not None:
            parts.append(self._average_tensors(self.request.ema, new))
        # last: its parameters take the place of those that the others look up
        return [
            *parts,
            GrownPart(partial(self._verify_module, candidate), partial(self._take_over, candidate)),
        ]

    def _verify_module(self, candidate: Module, peers: Peers) -> None:
        step = self.step
        old, new = self.old.parameters(), self.new.parameters(candidate)
        verify_parameters(step.plan, old, new, step.key, peers)
        with peers.phase():
            buffers = persistent_buffers(self.old.module)
            planned_buffers = grow_buffers(step.plan, buffers, candidate)
            verify_rounded(step.plan, persistent_buffers(candidate), planned_buffers)

    def _take_over(self, candidate: Module) -> None:
        for parameter in (*self.old.module.parameters(), *candidate.parameters()):
            parameter.grad = None
        has_wrapper = self.request.wrap is not None
        _set_special_ids(candidate if has_wrapper else self.old.module, self.exact)
        if not has_wrapper:
            take_over(self.old.module, candidate)

    def _average_module(self, ema: Module) -> GrownPart:
        step = self.step
        with self.peers.phase():
            if self.request.wrap is not None:
                raise GrowthError(
                    "with wrap=, ema= takes tensors by the names of parameters, no module"
                )
            old = replace(self.old, module=bare(ema))
            if old.parameters().keys() != self.old.parameters().keys():
                raise GrowthError("the moving average has other parameters than the model")
            average = build_whole(old, self.new.shape, step)
        pair = old.parameters(), self.new.parameters(average)
        return GrownPart(
            lambda peers: verify_parameters(step.plan, *pair, step.key, peers),
            lambda: take_over(old.module, average),
        )

    def _average_tensors(
        self, ema: MutableMapping[str, Tensor], parameters: Mapping[str, Parameter]
    ) -> GrownPart:
        step = self.step
        with self.peers.phase():
            old = {self.old.name(name): tensor for name, tensor in ema.items()}
            if odd := old.keys() ^ self.old.parameters().keys():
                raise GrowthError(f"the moving average has other names than the model: {min(odd)}")
        averages = grow_average(step, old, parameters, self.peers)

        def commit() -> None:
            ema.clear()
            ema.update({self.old.module_name(name): tensor for name, tensor in averages.items()})

        return GrownPart(
            lambda peers: verify_parameters(step.plan, old, averages, step.key, peers), commit
        )


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


def _warn_if_frozen(
    operation: str, larger: Growable, growth_plan: GrowthPlan, parameters: Mapping[str, Parameter]
) -> None:
    """Warn if all tensors that read what is new, or add it to a residual stream, are zero there and frozen; and of
    new adapters that are frozen."""
    table, streams = larger.parameters(), streams_of(larger)
    zeros = [
        name
        for name, tensor in growth_plan.tensors.items()
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
    frozen_adapters = (
        name
        for name, tensor in growth_plan.tensors.items()
        if isinstance(tensor, Fresh) and is_adapter(name) and not parameters[name].requires_grad
    )
    if name := next(frozen_adapters, None):
        logger.warning(
            "%s: new adapters are frozen, as their weights are (%s and its like): call requires_grad_() on them, and "
            "add them to the optimizer",
            operation,
            name,
        )


def _set_special_ids(module: Module, operation: Operation) -> None:
    """Give the settings of generation the ids of a new tokenizer."""
    settings: Any = getattr(module, "generation_config", None)
    if isinstance(operation.value, VocabularyMap) and settings is not None:
        for key, value in operation.value.special_ids(settings.to_dict()).items():
            setattr(settings, key, value)
