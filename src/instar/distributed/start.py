"""How many ranks a command starts on this machine, and on which GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instar.config.errors import ConfigError
from instar.distributed.placement import Placement

if TYPE_CHECKING:
    from instar.config.schema import ParallelConfig


@dataclass(frozen=True)
class Start:
    """`ranks` of all machines; `devices` of this machine's ranks, () for 0, 1, 2 …"""

    ranks: int
    devices: tuple[int, ...] = ()


def start_of(
    parallel: ParallelConfig,
    place: Placement,
    nproc: int | None = None,
    devices: Sequence[int] | None = None,
) -> Start:
    """What the environment says comes first, then the arguments, then the config, then one rank.

    Args:
        nproc: ranks that were asked for by hand; None: not asked.
        devices: GPUs that were asked for by hand, as many as ranks unless those are given too.

    Raises ConfigError if they contradict each other.
    """
    chosen = tuple(parallel.devices if devices is None else devices)
    if place.told:
        ranks = place.size
        if nproc not in (None, ranks):
            raise ConfigError.one(
                f"--nproc {nproc}, but the environment already makes this one of {ranks} "
                f"rank{'' if ranks == 1 else 's'}",
                where="--nproc",
                hint="leave it out: the ranks are started already",
            )
    elif devices is not None:
        ranks = nproc or len(devices)
    else:
        ranks = nproc or parallel.world_size or len(chosen) or 1
    here = place.local_size if place.told else ranks
    if chosen and len(chosen) < here:
        raise ConfigError.one(
            f"{here} ranks on this machine, but devices {','.join(map(str, chosen))} only",
            where="parallel.devices" if devices is None else "--devices",
            hint="one per rank",
        )
    return Start(ranks, chosen[:here])
