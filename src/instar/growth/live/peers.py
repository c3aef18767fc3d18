"""The processes of a training that grow a model together: those of its DDP, or of its shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from instar.distributed.shards import is_sharded
from instar.growth.engine.peers import Alone
from instar.growth.live.subject import wrappers
from instar.growth.plan import GrowthError


class GroupPeers:
    """`Peers` that have process groups in common."""

    def __init__(self, groups: Sequence[Any], device: torch.device) -> None:
        """
        Args:
            groups: through one after the other, every process is reached.
            device: from which they send.
        """
        self._groups, self._device = groups, device

    @contextmanager
    def phase(self) -> Iterator[None]:
        """See `Peers`. What only others raise is a GrowthError here."""
        own_error: Exception | None = None
        try:
            yield
        except Exception as error:
            own_error = error
        is_agreed = self.all_agree(own_error is None)
        if own_error is not None:
            raise own_error
        if not is_agreed:
            raise GrowthError(
                "another process could not grow the model; its own error says why. The model is as before"
            )

    def all_agree(self, holds: bool) -> bool:
        """See `Peers`."""
        return self._exchange(float(holds), dist.ReduceOp.MIN) == 1.0

    def at(self, what: str) -> GroupPeers:  # noqa: ARG002
        """See `Peers`."""
        return self

    def _exchange(self, value: float, how: Any) -> float:
        message = torch.tensor(value, dtype=torch.float64, device=self._device)
        for group in self._groups:
            dist.all_reduce(message, op=how, group=group)
        return message.item()

    def first(self, value: float) -> float:
        """Return the value of the first process. A collective."""
        is_first = all(dist.get_rank(group) == 0 for group in self._groups)
        # of others nothing is added, also if theirs is not finite
        return self._exchange(value if is_first else 0.0, dist.ReduceOp.SUM)


def peers_of(model: Module) -> Alone | GroupPeers:
    """Return the processes that train a model, passed with its wrappers, together."""
    for wrapper in wrappers(model):
        if isinstance(wrapper, DistributedDataParallel):
            return GroupPeers([wrapper.process_group], next(wrapper.parameters()).device)
    sharded_parameter = next(filter(is_sharded, model.parameters()), None)
    if sharded_parameter is None:
        return Alone()
    mesh = sharded_parameter.device_mesh
    kind = mesh.device_type
    device = (
        torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )
    return GroupPeers([mesh.get_group(dim) for dim in range(mesh.ndim)], device)
