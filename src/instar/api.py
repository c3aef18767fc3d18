"""Training from a script of one's own: `train` is what one rank does, `launch` starts ranks.

Importing this costs nothing; torch is imported by the first call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from instar.config.errors import ConfigError
from instar.distributed.failure import Interrupted, RunFailed
from instar.distributed.placement import LAUNCH_VARIABLE, placement, share_cores

if TYPE_CHECKING:
    from instar.config.load import Loaded
    from instar.run.resume import Resume


def train(
    config: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    *,
    rank: int | None = None,
    world_size: int | None = None,
    port: int | None = None,
) -> Path:
    """Train as one rank, to the end; returns the run's folder.

    Without a rank, this process is what torchrun's or SLURM's variables say, or the only one. With
    one it is that of `world_size` ranks on this machine, as in a function that
    `torch.multiprocessing.spawn` runs; all give the same `port`, or the config or MASTER_PORT names it.

    Args:
        config: path of a config file; None: the default config.
        overrides: texts such as "train.until=100it", as after `--set`.

    Raises:
        ConfigError: the run cannot start.
        RunFailed: it started and cannot go on; names the rank to blame, its step and the cause.
        Interrupted: SIGINT or SIGTERM asked it to stop, and all ranks did, at the same step.

    Call from the main thread.
    """
    from instar.distributed.launch import environment
    from instar.distributed.ranklog import RankLog
    from instar.distributed.signals import StopSignal

    share_cores(os.environ)
    with environment(_variables(rank, world_size, port)), StopSignal() as signal:
        from instar.run.rank import run
        from instar.schedule.checks import load_checked

        if rank is not None:
            _share_threads()
        loaded = load_checked(None if config is None else os.fspath(config), overrides)
        with RankLog(placement(os.environ).rank) as log:
            run(loaded, log, signal)
    assert log.path is not None
    return log.path.parents[1]


def launch(
    config: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    devices: Sequence[int] | None = None,
    max_restarts: int = 0,
) -> Path:
    """Start ranks on this machine as `instar train --nproc` does, and wait; returns the run's folder.

    Args:
        config: path of a config file; None: the default config.
        overrides: texts such as "train.until=100it", as after `--set`.
        world_size: ranks; default: as many as devices, or as the config says, or one.
        devices: GPUs of the ranks by index; default: as the config says.
        max_restarts: how often all ranks are started again, from the last checkpoint, if one fails.

    Raises:
        ConfigError: the run cannot start.
        RunFailed: a rank failed; names it, its step and the cause, with the last lines of its log.
        Interrupted: Ctrl-C or SIGTERM asked it to stop, and all ranks did, at the same step.

    Call from the main thread.
    """
    from instar.distributed.launch import run_ranks, say
    from instar.distributed.start import start_of
    from instar.schedule.checks import load_checked

    path = [] if config is None else [os.fspath(config)]
    loaded = load_checked(path[0] if path else None, overrides)
    place = placement(os.environ)
    if place.told:
        raise ConfigError.one(
            f"this process is already rank {place.rank} of {place.size}",
            where="environment",
            hint="call instar.api.train in each",
        )
    start = start_of(loaded.config.parallel, place, world_size, devices)
    make_ready(loaded, start.ranks, None, say)
    parallel = loaded.config.parallel
    ended = run_ranks(
        [*path, *(word for text in overrides for word in ("--set", text))],
        start.ranks,
        start.devices or None,
        device=loaded.config.device,
        host=parallel.master_address,
        port=parallel.master_port,
        max_restarts=max_restarts,
    )
    run_dir = ended.log.parents[1] if ended.log else None
    if ended.code == Interrupted.exit_code:
        raise Interrupted(ended.text or f"go on with: instar resume {run_dir}")
    if ended.code == ConfigError.exit_code:
        raise ConfigError.one("the ranks refused to start", hint="rank 0 has said why")
    if ended.code or run_dir is None:
        raise RunFailed(ended.text)
    return run_dir


def make_ready(
    loaded: Loaded, ranks: int, resume: Resume | None, say: Callable[[str], None]
) -> None:
    """Prepare the data, and find all mistakes before any rank is started; raises what they are."""
    from instar.run.preflight import preflight, prepare_data
    from instar.run.resume import automatic, choose, overridden

    prepare_data(loaded, ranks, say)
    going_on = resume or automatic(loaded.config)
    prepared = preflight(loaded, ranks, new=going_on is None)
    if going_on is not None:
        overridden(going_on, prepared.config)
        if ranks > 1:
            choose(going_on)


def _variables(rank: int | None, world_size: int | None, port: int | None) -> dict[str, str]:
    """What torchrun would have set for this rank."""
    if rank is None:
        if world_size is not None or port is not None:
            raise ConfigError.one(
                "world_size and port are for a rank that says which it is",
                where="instar.api.train",
                hint="give rank, or call instar.api.launch to start ranks",
            )
        return {}
    if world_size is None or not 0 <= rank < world_size:
        raise ConfigError.one(
            f"rank {rank} of {world_size} is not a possible rank",
            where="instar.api.train",
            hint="ranks are 0 to world_size - 1",
        )
    place = placement(os.environ)
    if place.size > 1 and (place.rank, place.size) != (rank, world_size):
        raise ConfigError.one(
            f"rank {rank} of {world_size}, but the environment says rank {place.rank} of "
            f"{place.size}",
            where="instar.api.train",
            hint="leave rank and world_size out",
        )
    if place.size > 1:
        return {}
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    here |= {"LOCAL_WORLD_SIZE": world_size} | ({"MASTER_PORT": port} if port else {})
    # Ranks that one process has started are of one launch.
    return {LAUNCH_VARIABLE: f"of-{os.getppid()}", **{k: str(v) for k, v in here.items()}}


def _share_threads() -> None:
    """The cores of this machine are divided among its ranks, if nobody has said how."""
    import torch

    from instar.distributed.launch import threads_per_rank

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank(placement(os.environ).local_size))
