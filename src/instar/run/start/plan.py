"""First two phases of a run: from what a rank is asked to do to a plan that all ranks have checked and agreed on.

`resolve_run` finds the run, the checkpoint that it goes on from, and its config. `check_run` checks everything on all
ranks, before anything of it is created."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from instar.checkpoint.manifest import line_of
from instar.checkpoint.store import LATEST, Checkpoint, load_checkpoint
from instar.config.load import Loaded
from instar.distributed.agree import agree, raise_on_all_ranks
from instar.distributed.failure import stopped_before_start
from instar.distributed.rank_log import RankLog
from instar.distributed.signals import StopSignal
from instar.distributed.world import World, recall
from instar.record.console import Console
from instar.record.control import Inbox
from instar.record.device import gpu_bytes
from instar.record.rundir import RunDir, hold
from instar.run.init_weights import Weights, starting_weights
from instar.run.parallel.micro_batch_sizes import sizes_to_come
from instar.run.resume import (
    Continuation,
    Resume,
    automatic,
    choose_checkpoint,
    continuation,
    rewind_step,
)
from instar.run.start.ahead import at_step_0, with_rest
from instar.run.start.preflight import Prepared, check_memory, preflight, prepare_run_data
from instar.run.start.rank_consistency import (
    check_folder_is_shared,
    compare_configs,
    compare_inputs,
    resolve_precision,
    resolve_strategy,
)
from instar.run.start.restore import OpenedWeights, open_weights
from instar.run.start.smoke_test_step import run_trial, try_sizes
from instar.run.state.sync_point import SyncPoint
from instar.run.step.hooks import check_hooks
from instar.schedule.operations import State

_CHECKING = "checking the config"


@dataclass(frozen=True)
class RunRequest:
    """What a rank is asked to do; the same on all ranks."""

    loaded_config: Loaded
    resume: Resume | None = None
    """how to resume a run; None: a new run, unless the config or a restart says otherwise"""
    launch_key: str = ""
    """under which the run is found again after its ranks were restarted"""
    only_test: bool = False
    """train no steps; run the final test of the checkpoint that `resume` names"""
    profiled_steps: int = 0
    """number of steps to profile, on every rank"""
    hooks: Sequence[object] = ()
    """called during training, see `instar.run.step.hooks`"""


@dataclass
class RankContext:
    """What one rank has opened for a run."""

    world: World
    log: RankLog
    signal: StopSignal
    console: Console
    record: ExitStack
    """closed after the process group is left, which knows at its end who was lost"""
    live: ExitStack
    """closed while the process group is still there"""
    weights: OpenedWeights | None = field(default=None, repr=False)
    """on rank 0, those that the run starts from, until its model has them"""


@dataclass(frozen=True)
class ResolvedRun:
    """Which run it is, and from where it goes on."""

    request: RunRequest
    loaded_config: Loaded
    """the config that is in force from here on"""
    resume: Resume | None = None
    """None: a new run"""
    checkpoint: Checkpoint | None = None
    """None: nothing was saved yet"""
    continuation: Continuation | None = None
    """of a resumed run"""
    warnings: Sequence[str] = ()
    """why later checkpoints were passed over"""


@dataclass(frozen=True)
class RunPlan:
    """A run that all ranks have checked and agreed on; nothing of it is created yet."""

    run: ResolvedRun
    prepared_run: Prepared
    initial: State | None
    """settings and architecture at step 0, of a resumed run"""
    warnings: Sequence[str]
    """logged at the start"""
    precision_reason: str
    """why `precision: auto` is what it is; empty if the config names it"""


def resolve_run(request: RunRequest, rank: RankContext) -> ResolvedRun:
    """Find out which run is meant, and read it if it is resumed. A collective.

    Raises:
        CheckpointError: there is no intact checkpoint to resume from, or it is of another run.
        ConfigError: the run cannot be resumed with this config.
        RunDirBusy: another process is training in the run's folder, which is held from here on.
        RunFailed: the ranks' configs differ.
    """
    loaded_config, world = request.loaded_config, rank.world
    # first of all: what the config says decides which collectives follow
    compare_configs(loaded_config.config, world)
    resume, checkpoint_before = _agree_to_resume(request, world)
    check_folder_is_shared(resume.run if resume else None, loaded_config.config.record, world)
    if resume is None:
        return ResolvedRun(request, loaded_config)
    # before the choice: whoever trains there may still save a later checkpoint, and settle what it has
    with raise_on_all_ranks(world, "taking the run's folder"):
        if world.is_main:
            rank.record.enter_context(hold(resume.run, rank.console.warn))
            Inbox(
                resume.run.control
            ).clear()  # to an earlier start; those that come now are to this one
    checkpoint, warnings = _agree_on_checkpoint(resume, world)
    if checkpoint is None:
        rank.console.say(f"{resume.run.path}: nothing was saved yet; the run starts again")
    elif request.resume is not None and checkpoint.path.name == checkpoint_before:
        # restarted before a new save: the changes are not in the checkpoint's history yet
        resume = replace(resume, by_person=request.resume.by_person)
    with raise_on_all_ranks(world, "reading the config of the resumed run"):
        resumed_run = continuation(resume, loaded_config, checkpoint)
    return ResolvedRun(
        request, resumed_run.loaded_config, resume, checkpoint, resumed_run, warnings
    )


def _agree_to_resume(request: RunRequest, world: World) -> tuple[Resume | None, str]:
    """Find the run to resume, on rank 0. A collective.

    It is the requested one, that of `resume: auto`, or the run that this launch started or resumed
    before its ranks were restarted.

    Returns:
        the resume, and the name of the checkpoint from which this launch resumed before, or "".
    """
    resume, answer = request.resume, ["", ""]
    # rank 0 alone looks: another rank could see a folder that is made meanwhile
    with raise_on_all_ranks(world, "looking for the run"):
        if world.is_main:
            folder, _, checkpoint_before = (recall(request.launch_key) or "").partition("\n")
            if folder or resume is None:
                automatically = automatic(request.loaded_config.config, folder or None)
                path = str(automatically.run.path) if automatically else ""
                answer = [path, checkpoint_before]
    folder, checkpoint_before = map(str, cast("list[str]", agree(world, answer)))
    if not folder:
        return resume, checkpoint_before
    return replace(
        resume or Resume(RunDir(Path(folder)), has_user_config=True),
        run=RunDir(Path(folder)),
        start=LATEST,
        fresh=True,
        by_person=False,
    ), checkpoint_before


def _agree_on_checkpoint(resume: Resume, world: World) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that rank 0 chooses (None: nothing saved yet), and warnings.

    A collective. The warnings say why later checkpoints were passed over.

    Raises:
        CheckpointError: there is no intact checkpoint.
    """
    path, warnings = "", list[str]()
    with raise_on_all_ranks(world, "choosing a checkpoint"):
        if world.is_main:
            checkpoint, errors = choose_checkpoint(resume)
            path = str(checkpoint.path) if checkpoint else ""
            warnings = [f"passed over: {error}" for error in errors]
            step = checkpoint and rewind_step(checkpoint.path, line_of(resume.run.path))
            if checkpoint is not None and step is not None:
                warnings.append(
                    f"{checkpoint.path.name} lies on a branch that the run left at step {step:,}"
                )
    path = str(agree(world, path))
    if not path:
        return None, warnings
    with raise_on_all_ranks(world, "reading the checkpoint"):
        # rank 0 has just read every byte of it
        return load_checkpoint(Path(path), check=False), warnings


def check_run(run: ResolvedRun, rank: RankContext) -> RunPlan:
    """Prepare the data, check the config on this machine, and try a micro-batch. A collective.

    Every rank's failure ends all ranks at the end of the part in which it happens: a later part communicates,
    and would wait for the rank that is gone.

    Raises:
        ConfigError: the run cannot start; nothing was created.
        RunFailed: the ranks' inputs differ.
        StoppedUnsaved, Interrupted: a stop was requested.
    """
    world, signal = rank.world, rank.signal
    world.at("preparing data")
    with raise_on_all_ranks(world, "preparing data"):
        if world.is_main:
            prepare_run_data(run.loaded_config, world.size, rank.console.say)
    loaded_config, preparation = _check_config(run, world)
    derived_keys, reason = set(preparation.derived_values), ""
    if preparation.config.precision == "auto":
        preparation, reason = resolve_precision(preparation, world)
        loaded_config = replace(
            loaded_config, origins={**loaded_config.origins, "precision": f"auto: {reason}"}
        )
        derived_keys.add("precision")
    run = replace(run, loaded_config=loaded_config)
    initial: State | None = None
    with raise_on_all_ranks(world, _CHECKING):
        if run.continuation is not None:
            resumed_run = run.continuation.with_derived(preparation.config, derived_keys)
            initial = at_step_0(resumed_run, preparation, world.size)
            run = replace(run, continuation=resumed_run)
        # a run that has saved has its own
        weights = (
            starting_weights(loaded_config, preparation.spec) if run.checkpoint is None else None
        )
    if weights is not None:
        _open_weights(weights, preparation, rank)
    # a run in a folder that `resume: auto` names can always be resumed
    signal.resumable = run.checkpoint is not None or loaded_config.config.resume == "auto"
    world.at("comparing the ranks' inputs")
    # before any rank builds what depends on them: layouts that differ would meet in one collective
    compare_inputs(preparation, world)
    world.at("trying one micro-batch")
    with raise_on_all_ranks(world, "trying one micro-batch"):
        warnings = _try_micro_batches(run, preparation, world)
    check_hooks([*preparation.spec.task(preparation.config).hooks(), *run.request.hooks], world)
    # the last moment at which all ranks can stop without a trace
    if SyncPoint(world, signal).sync():
        raise stopped_before_start(resumable=signal.resumable)
    signal.started = True
    return RunPlan(run, preparation, initial, warnings, reason)


def _check_config(run: ResolvedRun, world: World) -> tuple[Loaded, Prepared]:
    """Check the config for this rank's device; return it with its strategy, and what follows from it.

    A collective.
    """
    loaded_config = run.loaded_config
    with raise_on_all_ranks(world, _CHECKING):
        prepared_run = _prepare(run, loaded_config, world)
    # all ranks choose one strategy, by the smallest of their devices
    with_strategy = resolve_strategy(loaded_config, prepared_run, world)
    with raise_on_all_ranks(world, _CHECKING):
        if with_strategy is not loaded_config:
            loaded_config = with_strategy
            prepared_run = _prepare(run, with_strategy, world)
        check_memory(
            loaded_config,
            prepared_run.forecast,
            world.device.type,
            gpu_bytes(world.device),
            world.local_size,
        )
    return loaded_config, prepared_run


def _prepare(run: ResolvedRun, loaded_config: Loaded, world: World) -> Prepared:
    """Check a config against the data and this rank's kind of device, and forecast what is ahead."""
    resumed_run, device = run.continuation, world.device.type
    settings = None if resumed_run is None else resumed_run.settings
    new = run.resume is None
    prepared_run = preflight(loaded_config, world.size, new=new, settings=settings, device=device)
    if run.resume is None or resumed_run is None:
        return prepared_run
    control = run.resume.run.control
    return with_rest(prepared_run, resumed_run, run.checkpoint, world.size, device, control)


def _open_weights(weights: Weights, prepared_run: Prepared, rank: RankContext) -> None:
    """Open the weights that a new run starts from, on rank 0, from which the others get them. A collective."""
    rank.world.at("reading the starting weights")
    with raise_on_all_ranks(rank.world, "reading the starting weights"):
        if rank.world.is_main:
            rank.console.say(f"starting from {weights.about}")
            rank.weights = open_weights(weights, prepared_run.spec.architecture)


def _try_micro_batches(run: ResolvedRun, prepared_run: Prepared, world: World) -> list[str]:
    """Run micro-batches as the run will, and return warnings of its start."""
    if run.continuation is None:
        return [*prepared_run.warnings, *run_trial(prepared_run, world)]
    sizes = sizes_to_come(prepared_run.config, prepared_run.forecast, world.size)
    return try_sizes(prepared_run, world, sizes)
