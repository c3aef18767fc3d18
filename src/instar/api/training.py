"""Training from a Python script: `train` is the work of one rank, `launch` starts ranks.

Importing this module is cheap; torch is imported by the first call.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

from instar.api.as_config import Config, Overrides, as_arguments
from instar.api.curves import Curves, draw_end, live_curves
from instar.api.definitions import code_for_children
from instar.config.errors import ConfigError
from instar.distributed.failure import NOTHING_STARTED, Interrupted, RunFailed, StoppedUnsaved
from instar.distributed.launch import environment, print_stderr, run_ranks, threads_per_rank
from instar.distributed.placement import (
    LAUNCH_VARIABLE,
    placement,
    resolve_ranks,
)
from instar.distributed.rank_log import RankLog
from instar.distributed.signals import StopSignal
from instar.processes.cores import share_cores
from instar.record.rundir import find_run
from instar.record.start_folder import begun_in
from instar.run.load_config import load_run_config
from instar.run.resume import Resume, named_checkpoint
from instar.run.start.launch import launch_options, preflight_launch


def train(
    config: Config = None,
    overrides: Overrides = (),
    *,
    rank: int | None = None,
    world_size: int | None = None,
    port: int | None = None,
    hooks: Sequence[object] = (),
    curves: Curves = None,
) -> Path:
    """Train as one rank until the run ends, and return the run's folder. Call from the main thread.

    Without `rank`, torchrun's or SLURM's environment variables give the rank, or it is the only
    one. With `rank`, it is one of `world_size` ranks on this machine, as in a function run by
    `torch.multiprocessing.spawn`; all pass the same `port`, or the config or MASTER_PORT gives it.

    Args:
        config: path of a config file, or its content, such as {"train": {"until": "100it"}}, in which `task` may be
            a class, also of a notebook; None: the default config.
        overrides: strings such as "train.until=100it", as after `--set`, or values by key.
        hooks: objects whose methods are called during training, the same on every rank
            (docs/hooks.md).
        curves: metrics that are drawn below the cell of a notebook meanwhile; default: the losses; False: none.

    Raises:
        ConfigError: the run cannot start.
        RunFailed: the run failed; names the rank at fault, its step and the cause.
        Interrupted: all ranks stopped at the same step after a stop signal (SIGINT, SIGTERM,
            SIGHUP, …); its subclass StoppedUnsaved if there is nothing to resume.
    """
    share_cores(os.environ)
    with environment(_variables(rank, world_size, port)), StopSignal() as signal:
        from instar.run.start.build import as_before
        from instar.run.worker import run

        with as_before():
            if rank is not None:
                _share_threads()
            loaded_config = load_run_config(*as_arguments(config, overrides))
            drawing = live_curves(curves)
            hooks = hooks if drawing is None else (*hooks, drawing)
            place, workers = RankLog(placement(os.environ).rank), loaded_config.config.data.workers
            try:
                with code_for_children(loaded_config, is_parent=bool(workers)), place as log:
                    return run(loaded_config, log, signal, hooks=hooks)
            finally:
                draw_end(drawing, place.path)


def launch(
    config: Config = None,
    overrides: Overrides = (),
    *,
    world_size: int | None = None,
    devices: Sequence[int] | None = None,
    max_restarts: int = 0,
    curves: Curves = None,
) -> Path:
    """Start ranks on this machine, as `instar train --nproc` does, wait for them, and return the
    run's folder. Call from the main thread.

    Args:
        config: path of a config file, or its content, such as {"train": {"until": "100it"}}, in which `task` may be
            a class, also of a notebook; None: the default config.
        overrides: strings such as "train.until=100it", as after `--set`, or values by key.
        world_size: number of ranks; default: the number of devices, else from the config, else 1.
        devices: GPU indices of the ranks; default: from the config.
        max_restarts: how many times all ranks are restarted from the last checkpoint after a failure.
        curves: metrics that are drawn below the cell of a notebook meanwhile; default: the losses; False: none.

    Raises:
        ConfigError: the run cannot start.
        RunFailed: a rank failed; names it, its step and the cause, with the last lines of its log.
        Interrupted: all ranks stopped at the same step after a stop signal (SIGINT, SIGTERM,
            SIGHUP, …); its subclass StoppedUnsaved if there is nothing to resume.
    """
    return _launch(
        *as_arguments(config, overrides),
        None,
        world_size=world_size,
        devices=devices,
        max_restarts=max_restarts,
        curves=curves,
    )


def resume(
    run: str | os.PathLike[str],
    overrides: Overrides = (),
    *,
    start: str = "latest",
    allow: Sequence[str] = (),
    world_size: int | None = None,
    devices: Sequence[int] | None = None,
    max_restarts: int = 0,
    curves: Curves = None,
) -> Path:
    """Resume a run from a checkpoint, as `instar resume` does, and return its folder.

    Meanwhile the current folder is the one that the run was started in, where its relative paths begin.

    Args:
        run: its folder, id or name, or `latest`.
        overrides: settings that change, such as "train.until=4000it", or values by key; they are recorded.
        start: latest, best, best-<metric>, or a step.
        allow: what may differ from the run: architecture, data, tokenizer.
        world_size, devices, max_restarts, curves: see `launch`; the number of ranks may differ.

    Raises:
        ConfigError: there is no such run, or it cannot be resumed with these settings.
        CheckpointError: there is no such checkpoint, or it is damaged.
        RunFailed, Interrupted: see `launch`.
    """
    _, settings = as_arguments(None, overrides)
    run_dir, base, texts = begun_in(find_run(os.fspath(run)), settings, print_stderr)
    resume_request = Resume(run_dir, start, tuple(allow), fresh=start == "latest")
    named_checkpoint(resume_request)
    with chdir(base):
        return _launch(
            str(run_dir.config),
            texts,
            resume_request,
            world_size=world_size,
            devices=devices,
            max_restarts=max_restarts,
            curves=curves,
        )


def _launch(
    config: str | None,
    overrides: Sequence[str],
    resume: Resume | None,
    *,
    world_size: int | None,
    devices: Sequence[int] | None,
    max_restarts: int,
    curves: Curves,
) -> Path:
    loaded_config = load_run_config(config, overrides)
    drawing = live_curves(curves)
    place = placement(os.environ)
    if place.is_set:
        raise ConfigError.of(
            f"this process is already rank {place.rank} of {place.size}",
            where="environment",
            hint="call instar.api.train in each",
        )
    count = resolve_ranks(loaded_config.config.parallel, place, world_size, devices)
    argv = [] if config is None or resume is not None else [config]
    argv += [word for text in overrides for word in ("--set", text)]
    argv += [] if resume is None else resume.words()
    options = launch_options(loaded_config, argv, count, resume, max_restarts)
    with code_for_children(loaded_config):
        preflight_launch(loaded_config, count.ranks, resume, print_stderr, devices)
        result = run_ranks(options, watch=None if drawing is None else drawing.update)
    draw_end(drawing, result.log)
    run_dir = result.log.parents[1] if result.log else None
    if result.code == Interrupted.exit_code:
        raise Interrupted(result.text or f"resume with: instar resume {shlex.quote(str(run_dir))}")
    if result.code == StoppedUnsaved.exit_code:
        raise StoppedUnsaved(result.text or NOTHING_STARTED)
    if result.code == ConfigError.exit_code:
        raise ConfigError.of("the ranks could not start", hint="see the output of rank 0")
    if result.code or run_dir is None:
        raise RunFailed(result.text)
    return run_dir


def _variables(rank: int | None, world_size: int | None, port: int | None) -> dict[str, str]:
    """Return the environment variables that torchrun would set for this rank."""
    if rank is None:
        if world_size is not None or port is not None:
            raise ConfigError.of(
                "world_size and port need rank",
                where="instar.api.train",
                hint="pass rank, or call instar.api.launch to start ranks",
            )
        return {}
    if world_size is None or not 0 <= rank < world_size:
        raise ConfigError.of(
            f"rank {rank} of {world_size} is not a possible rank",
            where="instar.api.train",
            hint="ranks are 0 to world_size - 1",
        )
    place = placement(os.environ)
    if place.size > 1 and (place.rank, place.size) != (rank, world_size):
        raise ConfigError.of(
            f"rank {rank} of {world_size}, but the environment says rank {place.rank} of "
            f"{place.size}",
            where="instar.api.train",
            hint="leave rank and world_size out",
        )
    if place.size > 1:
        return {}
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    variables |= {"LOCAL_WORLD_SIZE": world_size} | ({"MASTER_PORT": port} if port else {})
    # Ranks started by the same process belong to one launch.
    return {LAUNCH_VARIABLE: f"of-{os.getppid()}", **{k: str(v) for k, v in variables.items()}}


def _share_threads() -> None:
    """Divide the cores of this machine among its ranks, unless OMP_NUM_THREADS is set."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank(placement(os.environ).local_size))
