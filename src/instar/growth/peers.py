"""The processes that grow a model together, by DDP or with its shards, and the only loop in which they communicate and may fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from instar.distributed.shards import is_sharded
from instar.growth.live.subject import wrappers
from instar.growth.plan import GrowthError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_END = object()


class Peers(Protocol):
    """The processes that grow a model together. They must go the same way, whatever a single one of them sees."""

    def phase(self) -> AbstractContextManager[None]:
        """Context for work that may fail on some of them: raises on all, or on none. A collective."""
        ...

    def all_agree(self, holds: bool) -> bool:
        """Return whether something holds on all of them. A collective."""
        ...

    def at(self, what: str) -> Peers:
        """Return the same, doing something else: for the errors of a phase."""
        ...


class Alone:
    """`Peers` of a process that grows a model by itself."""

    def phase(self) -> AbstractContextManager[None]:
        return nullcontext()

    def all_agree(self, holds: bool) -> bool:
        return holds

    def at(self, what: str) -> Alone:  # noqa: ARG002
        return self

    def first(self, value: float) -> float:
        return value


def run_in_step(peers: Peers, work: Iterable[object], *, gathers: bool) -> None:
    """Run a generator to its end; a failure of one process is raised by all.

    Args:
        work: yields after each tensor.
        gathers: whether each tensor is gathered. Then the processes agree after each: one that failed between two of
            them would leave the others waiting in the next.
    """
    steps = iter(work)
    if not gathers:
        with peers.phase():
            for _ in steps:
                pass
        return
    step: object = None
    while step is not _END:
        with peers.phase():
            step = next(steps, _END)


def unless_refused(peers: Peers, name: str, work: Callable[[], T]) -> T | None:
    """Return what `work` returns; None on all, if the model's code refuses float64 on any of them. A collective.

    Args:
        name: of what is compared, for the log.
    """
    value, refusal = None, ""
    with peers.phase():
        try:
            value = work()
        except GrowthError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            refusal = str(error) or type(error).__name__
    # a process that alone went on to compare would wait for the others in its next exchange
    if peers.all_agree(not refusal):
        return value
    logger.info(
        "%s is not compared in float64: %s", name, refusal or "another process refuses float64"
    )
    return None


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
        return self._exchange(float(holds), dist.ReduceOp.MIN) == 1.0

    def at(self, what: str) -> GroupPeers:  # noqa: ARG002
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
