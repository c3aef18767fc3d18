"""Second phase of a run: everything is checked on all ranks, before anything of it is created."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from instar.config.budget import Counters
from instar.config.load import Loaded
from instar.distributed.agree import raise_on_all_ranks
from instar.distributed.failure import stopped_before_start
from instar.distributed.world import World
from instar.record.system import gpu_bytes
from instar.run.origin.init_weights import Weights, starting_weights
from instar.run.origin.resume import Continuation
from instar.run.parallel.micro_batch_sizes import sizes_ahead
from instar.run.start.plan import RankContext, ResolvedRun, RunPlan
from instar.run.start.preflight import Prepared, check_memory, preflight, prepare_run_data
from instar.run.start.rank_consistency import compare_inputs, resolve_precision, resolve_strategy
from instar.run.start.restore import saved_counters
from instar.run.start.smoke_test_step import run_trial, try_sizes
from instar.run.start.weights import open_weights
from instar.run.state.sync_point import SyncPoint
from instar.run.step.hooks import check_hooks
from instar.schedule.operations import State, initial_state
from instar.tasks.task import spec_class

_CHECKING = "checking the config"


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
            run, initial = _at_step_0(run, run.continuation, preparation, derived_keys, world)
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
        warnings = _try_micro_batches(run, preparation, initial, world)
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
    loaded_config, new = run.loaded_config, run.resume is None
    with raise_on_all_ranks(world, _CHECKING):
        prepared_run = preflight(loaded_config, world.size, new=new)
    # all ranks choose one strategy, by the smallest of their devices
    with_strategy = resolve_strategy(loaded_config, prepared_run, world)
    with raise_on_all_ranks(world, _CHECKING):
        if with_strategy is not loaded_config:
            loaded_config = with_strategy
            prepared_run = preflight(with_strategy, world.size, new=new)
        check_memory(
            loaded_config,
            prepared_run.forecast,
            world.device.type,
            gpu_bytes(world.device),
            world.local_size,
        )
    return loaded_config, prepared_run


def _at_step_0(
    run: ResolvedRun,
    continuation: Continuation,
    prepared_run: Prepared,
    derived_keys: Collection[str],
    world: World,
) -> tuple[ResolvedRun, State]:
    """Return a resumed run without open keys, and its settings and architecture at step 0."""
    continuation = continuation.with_derived(prepared_run.config, derived_keys)
    spec, began = prepared_run.spec, continuation.began
    if began.model != prepared_run.config.model:
        config = prepared_run.config.model_copy(update={"model": began.model})
        loaded_config = replace(continuation.loaded_config, config=config)
        spec = spec_class(config.task).open(loaded_config, world.size)
    return replace(run, continuation=continuation), initial_state(began, spec.architecture)


def _open_weights(weights: Weights, prepared_run: Prepared, rank: RankContext) -> None:
    """Open the weights that a new run starts from, on rank 0, from which the others get them. A collective."""
    rank.world.at("reading the starting weights")
    with raise_on_all_ranks(rank.world, "reading the starting weights"):
        if rank.world.is_main:
            rank.console.say(f"starting from {weights.about}")
            rank.weights = open_weights(weights, prepared_run.spec.architecture)


def _try_micro_batches(
    run: ResolvedRun, prepared_run: Prepared, initial: State | None, world: World
) -> list[str]:
    """Run micro-batches as the run will, and return warnings of its start."""
    if run.continuation is None or initial is None:
        return [*prepared_run.warnings, *run_trial(prepared_run, world)]
    progress = Counters() if run.checkpoint is None else saved_counters(run.checkpoint)
    past = run.continuation.history, run.continuation.operation, progress
    return try_sizes(
        prepared_run, world, sizes_ahead(initial, *past, prepared_run.spec, world.size)
    )
