"""Every rank trains a replica by itself, and after a round of steps all take a common one: DiLoCo.

What the replicas have moved by in a round, on the mean, is the gradient of an outer optimizer, SGD with
Nesterov momentum (Douillard et al. 2023, arXiv 2311.08105, algorithm 1). Unlike there, the states of the
replicas' own optimizers are averaged as well: between rounds all ranks hold the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from instar.config.schema import RunConfig
from instar.data.loader import StepBatch
from instar.distributed.agree import collective, gather
from instar.distributed.all_reduce import tree_sum
from instar.distributed.world import World
from instar.run.parallel.replicated import Replicated, compiled
from instar.run.parallel.strategy import MicroBatchCalls, RoundEnd, Rounds, freeze

Layout: TypeAlias = dict[str, float | list[int]]
"""Of each state of an optimizer: its shape, or its value if it has no dimensions."""

BUCKET = 1 << 24
"""Number of elements after which `mean_over_ranks` begins another message."""


class DiLoCo(Replicated):
    """Local steps, each with the gradient of this rank's share of the batch, and an outer optimizer."""

    def __init__(self, config: RunConfig, world: World, bare: torch.nn.Module) -> None:
        """
        Raises:
            ValueError: the model communicates in its forward pass.
        """
        super().__init__(world, bare)
        if any(isinstance(module, torch.nn.SyncBatchNorm) for module in bare.modules()):
            raise ValueError(
                "SyncBatchNorm communicates in every forward pass, but with parallel.strategy diloco ranks "
                "train apart: use BatchNorm, or strategy: ddp"
            )
        options = config.parallel.diloco
        self.sync_every = options.sync_every
        self.momentum: dict[str, Tensor] = {}
        self.rounds: Rounds | None = self
        self.model = compiled(bare) if config.compile else bare
        self._lr, self._decay = options.outer_lr, options.outer_momentum
        self._sent = getattr(torch, options.exchange)
        self._start: dict[str, Tensor] = {}
        """weights at the beginning of the round, by parameter; {}: between rounds"""

    def freeze(self, patterns: Sequence[str]) -> None:
        freeze(self.parameters, patterns)

    def without_reduction(self) -> AbstractContextManager[None]:
        return nullcontext()

    def accumulate(self, batch: StepBatch, calls: MicroBatchCalls) -> None:
        if not self._start:
            self._start = {
                name: parameter.detach().clone()
                for name, parameter in self.parameters.items()
                if parameter.requires_grad
            }
        # as under DDP: the mean of all ranks' gradients is that of the global batch, also where their
        # shares differ
        scale = self.world.size / batch.weight
        for micro in batch.micro_batches:
            if micro.samples:
                calls.backward(calls.forward(micro) * scale)
        calls.before_sync()

    @torch.no_grad()
    def end(self, states: Mapping[str, Tensor], n_skipped: int, in_a_row: int) -> RoundEnd:
        layout: Layout = {n: list(t.shape) if t.ndim else t.item() for n, t in states.items()}
        digest = xxhash.xxh3_64_hexdigest(json.dumps(layout, sort_keys=True).encode())
        answers = cast(
            list[tuple[int, int, str]], gather(self.world, [n_skipped, in_a_row, digest])
        )
        mean_states: dict[str, Tensor] | None = None
        if len({other for _, _, other in answers}) > 1:
            mean_states = self._join_states(states, cast(list[Layout], gather(self.world, layout)))
        start, self._start = self._start, {}
        movements = [before - self.parameters[name] for name, before in start.items()]
        entries = sorted((mean_states or states).items())
        moments = [tensor for _, tensor in entries if tensor.ndim]
        means = mean_over_ranks(self.world, [*movements, *moments], self._sent)
        # nothing is trained while all parameters are frozen
        finite = not means or all(torch.stack([mean.isfinite().all() for mean in means]).tolist())
        if finite:
            self._step(start, means[: len(movements)])
            if moments:
                torch._foreach_copy_(moments, means[len(movements) :])
        else:
            mean_states = {}  # they may not be finite either
            for name, before in start.items():
                self.parameters[name].copy_(before)
        counts, last = [n for n, _, _ in answers], max(n for _, n, _ in answers)
        return RoundEnd(counts, last, finite, mean_states)

    def _step(self, start: Mapping[str, Tensor], gradients: Sequence[Tensor]) -> None:
        """Take a step of the outer optimizer from the weights at the beginning of the round."""
        if not self._decay:
            self.momentum = {}
        for (name, before), gradient in zip(start.items(), gradients, strict=True):
            step = gradient
            if self._decay:
                momentum = self.momentum.setdefault(name, torch.zeros_like(gradient))
                momentum.mul_(self._decay).add_(gradient)
                step = gradient.add(momentum, alpha=self._decay)
            self.parameters[name].copy_(before.sub(step, alpha=self._lr))

    def _join_states(
        self, states: Mapping[str, Tensor], everyones: Sequence[Layout]
    ) -> dict[str, Tensor]:
        """Return the states that any rank has: where a rank has none, as all its gradients were skipped,
        zeros; of numbers, such as counts of steps, the mean over the ranks that have one."""
        mean_states: dict[str, Tensor] = {}
        for name in sorted(set().union(*everyones)):
            values = [layout[name] for layout in everyones if name in layout]
            if isinstance(values[0], list):
                mean_states[name] = states.get(
                    name, torch.zeros(values[0], device=self.world.device)
                )
            else:
                mean = math.fsum(cast(list[float], values)) / len(values)
                is_integral = all(isinstance(value, int) for value in values)
                mean_states[name] = torch.tensor(round(mean) if is_integral else mean)
        return mean_states


def mean_over_ranks(
    world: World, tensors: Sequence[Tensor], wire_dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return the mean of each tensor over all ranks, in float32, the same bits on all. A collective.

    It takes two messages per rank and bucket, one after the other, however many ranks there are, where a
    ring takes 2 (W - 1): on a slow network, latency is what an exchange of a small model costs.

    Args:
        wire_dtype: the type in which values travel.
    """
    if world.size == 1:
        return [tensor.float() for tensor in tensors]
    means: list[Tensor] = []
    bucket: list[Tensor] = []
    for number, tensor in enumerate(tensors, start=1):
        bucket.append(tensor)
        if number == len(tensors) or sum(part.numel() for part in bucket) >= BUCKET:
            flat = torch.cat([part.detach().flatten().to(torch.float32) for part in bucket])
            pieces = torch.split(_mean(world, flat, wire_dtype), [part.numel() for part in bucket])
            means += [piece.view_as(part) for piece, part in zip(pieces, bucket, strict=True)]
            bucket = []
    return means


def _mean(world: World, flat: Tensor, wire_dtype: torch.dtype) -> Tensor:
    piece = -(-len(flat) // world.size)
    padded_flat = torch.nn.functional.pad(flat, (0, piece * world.size - len(flat))).to(wire_dtype)
    my_rows, everyones = torch.empty_like(padded_flat), torch.empty_like(padded_flat)
    with collective(world, "averaging the replicas"):
        # as bytes: backends do not send every type
        dist.all_to_all_single(my_rows.view(torch.uint8), padded_flat.view(torch.uint8))
        mean = tree_sum(my_rows.view(world.size, piece).float()).div_(world.size).to(wire_dtype)
        pieces = everyones.view(torch.uint8).view(world.size, -1).unbind()
        dist.all_gather(list(pieces), mean.view(torch.uint8))
    return everyones[: len(flat)].float()
