"""A module in anybody's loop that grows, with its optimizers and its moving average: whole, or in shards."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
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
from instar.growth.apply import GrowthStep, grow_buffers, moments_mode
from instar.growth.axes import Use
from instar.growth.engine import GrownPart, fill_buffers, fill_parameters, grow_average
from instar.growth.folders import check_own_family
from instar.growth.live.build import Wrap, build_sharded, build_whole, take_over
from instar.growth.live.optimizers import prepare_optimizer
from instar.growth.live.probe import draw_probe, reshard, run_probe, to_device
from instar.growth.live.subject import Build, Subject, bare, subject_of
from instar.growth.live.vocabulary import with_vocabulary
from instar.growth.operators import plan
from instar.growth.peers import Peers
from instar.growth.plan import Fresh, Grown, GrowthError, GrowthPlan, New, VocabularyMap
from instar.growth.proof import Doubled, Probe, Proof, verify_parameters, verify_rounded
from instar.models.hf.pretrained import PretrainedShape
from instar.models.module import persistent_buffers
from instar.models.shape import Growable, streams_of

logger = logging.getLogger(__name__)

Ema = Module | MutableMapping[str, Tensor]


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


def live_growth(model: Module, request: GrowthRequest, peers: Peers) -> LiveGrowth:
    """Return what grows. Does not communicate."""
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
    batch = None if batch is None or batch is False else to_device(batch, device)
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
        batch = to_device(self.batch, next(candidate.parameters()).device, torch.float64)
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
            _warn_if_frozen(self.name, self.new.shape, self.step.plan, new)
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


def _warn_if_frozen(
    operation: str, larger: Growable, growth_plan: GrowthPlan, parameters: Mapping[str, Parameter]
) -> None:
    """Warn if all tensors that read what is new, or add it to a residual stream, are zero there and frozen."""
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


def _set_special_ids(module: Module, operation: Operation) -> None:
    """Give the settings of generation the ids of a new tokenizer."""
    settings: Any = getattr(module, "generation_config", None)
    if isinstance(operation.value, VocabularyMap) and settings is not None:
        for key, value in operation.value.special_ids(settings.to_dict()).items():
            setattr(settings, key, value)
