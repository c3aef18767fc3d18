"""One rank of a run, from start to end: resolve, check, open, train, finish."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from instar.checkpoint.manifest import CheckpointError
from instar.config.errors import InstarError
from instar.config.load import Loaded
from instar.distributed.agree import agree, raise_on_all_ranks
from instar.distributed.failure import Interrupted, PeerError, RunFailed, exits_fail, point_to_log
from instar.distributed.rank_log import RankLog
from instar.distributed.signals import StopSignal, training_started
from instar.distributed.world import join_group
from instar.record.atomic import finish_deleting
from instar.record.console import open_console, silent_console
from instar.record.progress import Display, showing
from instar.record.rundir import RunDir
from instar.run.changes.branching import unfinished_branches
from instar.run.changes.requests import warn_of_unsaved
from instar.run.checkpointing import finish_extensions, update_best_pointers
from instar.run.final_test import is_tested, run_final_test
from instar.run.output.extension import end_extensions
from instar.run.output.profile import StepProfiler
from instar.run.resume import LAUNCH_KEY, Resume
from instar.run.start.build import compile_stages
from instar.run.start.opening import OpenRun, forget_last_trainer, open_run
from instar.run.start.plan import RankContext, RunPlan, RunRequest, check_run, resolve_run
from instar.run.state.run_state import Decision
from instar.run.trainer import Trainer

logger = logging.getLogger(__name__)

DELETING_S = 60.0
"""Longest wait of a finished run for the deletion of old checkpoints, in seconds. Any that are left
are deleted when the run is resumed."""

Branches = list[tuple[RunDir, Loaded]]
"""Branches that are left to train, with their configs."""

_calls = count()
"""Number of calls of `run` in this process. A script may train in a loop: each call is a run of its
own, which is found again after the launcher has restarted the script."""


def run(
    loaded_config: Loaded,
    log: RankLog,
    signal: StopSignal,
    resume: Resume | None = None,
    *,
    only_test: bool = False,
    profiled_steps: int = 0,
    hooks: Sequence[object] = (),
) -> Path:
    """Train as one rank of the world that the environment variables describe, then the run's branches, and
    return the run's folder. A collective.

    Args:
        resume: how to resume a run; None: a new run, unless the config or a restart says otherwise.
        only_test: train no steps; run the final test of the checkpoint that `resume` names.
        profiled_steps: number of steps to profile, on every rank.
        hooks: called during training, see `instar.run.step.hooks`.

    Raises:
        ConfigError: the run cannot start; nothing was created.
        CheckpointError: there is no intact checkpoint to resume from, or it is of another run.
        RunDirBusy: another process is training in the run's folder.
        RunFailed: the run started and cannot continue.
        Interrupted: a stop was requested, and all ranks stopped at the same step.
    """
    launch_key = f"{LAUNCH_KEY}/{next(_calls)}"
    request = RunRequest(loaded_config, resume, launch_key, only_test, profiled_steps, hooks)
    branches = _train_and_report(request, log, signal)
    assert log.path is not None
    folder, path, has_branches = log.path.parents[1], log.path, bool(branches)
    try:
        while branches:
            (branch, config), *branches = branches
            request = replace(
                request,
                loaded_config=config,
                resume=Resume(branch),
                launch_key=f"{launch_key}/{branch.path.name}",
                profiled_steps=0,
            )
            branches = [*_train_and_report(request, log, signal), *branches]
            point_to_log(path, os.environ)
    except Interrupted:
        raise Interrupted(f"resume with: instar resume {RunDir(folder).shell_word}") from None
    finally:
        if has_branches and log.rank == 0:
            # its report shows how its branches have ended, also one that has failed
            end_extensions(RunDir(folder), loaded_config.config)
    return folder


def _train_and_report(request: RunRequest, log: RankLog, signal: StopSignal) -> Branches:
    """Train one run, and write its report whatever becomes of it; return its branches. A collective."""
    wait_s = 0.5
    forget_last_trainer()
    try:
        with exits_fail("the task's code"):
            branches = _train_run(request, log, signal)
        # only after success: otherwise a scheduler or other ranks wait for this one to end
        wait_s = DELETING_S
        return branches
    finally:
        finish_deleting(wait_s)
        if log.path is not None and log.rank == 0:
            end_extensions(RunDir(log.path.parent.parent), request.loaded_config.config)


def _train_run(request: RunRequest, log: RankLog, signal: StopSignal) -> Branches:
    """Train one run from its start to its end, and return its branches that are left to train.

    A collective. All ranks pass the phases together: each phase ends where all ranks know that none of them
    failed in it, so that no rank ever waits for another in a collective that the other does not reach.
    """
    with _join_ranks(request, log, signal) as rank:
        # which run, from which checkpoint, with which config
        resolved_run = resolve_run(request, rank)
        plan = check_run(resolved_run, rank)  # the data, the config, this machine; one micro-batch
        run = open_run(plan, rank)  # the folder, the record, the trainer at the run's present step
        if request.only_test:
            _test_only(plan, run)
            return []
        decision = _train(plan, run, rank)
        trainer = run.trainer
        branches = Branches()
        if not decision.is_interrupted:
            branches = unfinished_branches(trainer.state, trainer.parts, run.run_dir.path)
    # outside, so that neither is recorded as a failure: the record has the decision
    _raise_unless_ended(decision, run)
    return branches


@contextmanager
def _join_ranks(request: RunRequest, log: RankLog, signal: StopSignal) -> Iterator[RankContext]:
    """Context manager: this rank in the process group, with its console. A collective."""
    parallel, device = request.loaded_config.config.parallel, request.loaded_config.config.device
    with ExitStack() as record, join_group(parallel, device) as world, ExitStack() as live:
        console = open_console() if world.is_main else silent_console()
        record.enter_context(closing(console))
        display = Display(lambda: console.screen, owns=False) if world.is_main else None
        record.enter_context(showing(display))
        yield RankContext(world, log, signal, console, record, live)


def _test_only(plan: RunPlan, run: OpenRun) -> None:
    """Run the final test of the checkpoint that the resume names. A collective."""
    checkpoint, trainer = plan.run.checkpoint, run.trainer
    name = checkpoint.path.name if checkpoint else "last"
    if run_final_test(trainer.state, trainer.parts, run.run_dir.path, weights=name) is None:
        raise Interrupted(f"again: instar test {run.run_dir.shell_word}")


def _train(plan: RunPlan, run: OpenRun, rank: RankContext) -> Decision:
    """Train to the run's end, unless it is there already; return why it ended. A collective."""
    trainer, profiled_steps = run.trainer, plan.run.request.profiled_steps
    if plan.run.checkpoint is not None:
        update_best_pointers(trainer.state, trainer.parts, plan.run.checkpoint.path)
    if run.end is not None:
        return _end_complete_run(trainer, run.run_dir, run.end)
    if profiled_steps:
        trace = run.run_dir.profile(rank.world.rank)
        profiler = StepProfiler(profiled_steps, trace, rank.world.device, rank.console.say)
        rank.live.enter_context(closing(profiler))
        trainer.around_step = profiler.step
    return _train_to_end(trainer, run.run_dir)


def _train_to_end(trainer: Trainer, run_dir: RunDir) -> Decision:
    """Train, save and test; return why the run ended."""
    training_started()
    try:
        compile_stages(trainer.state, trainer.parts)
        outcome = trainer.train()
        extension_error: InstarError | None = None
        if not outcome.decision.is_failure:
            try:
                finish_extensions(trainer.state, trainer.parts)
            except (CheckpointError, PeerError) as error:
                extension_error = error  # without what it writes, there is a checkpoint still
        trainer.save(outcome.decision.reason, must=True)
        if extension_error is not None:
            raise extension_error
    except BaseException:
        trainer.parts.saver.abandon()
        with suppress(Exception):
            warn_of_unsaved(trainer.state, trainer.parts, run_dir)
        if trainer.parts.world.size == 1:  # with several ranks, a collective could hang
            with suppress(Exception):
                trainer.parts.logger.flush_interval(trainer.state.progress)
        raise
    return _finish(trainer, run_dir, outcome.decision, test=trainer.parts.config.test.at_end)


def _end_complete_run(trainer: Trainer, run_dir: RunDir, reason: str) -> Decision:
    """End a resumed run that is complete: save nothing, and run the final test only if missing."""
    go_on = f"set a later end, e.g.: instar resume {run_dir.shell_word} --until {2 * max(1, trainer.state.step)}it"
    if not Decision(reason, is_interrupted=False).is_budget:
        go_on = (
            "give early_stopping.rules more patience, or leave them out: "
            f"instar resume {run_dir.shell_word} --set early_stopping=null"
        )
    trainer.parts.logger.console.say(
        f"{reason}: nothing is left to train in it, and nothing was saved or set; to continue, {go_on}"
    )
    # an earlier process may have ended between its last checkpoint and what extensions write last
    finish_extensions(trainer.state, trainer.parts)
    missing = False
    if trainer.parts.config.test.at_end:
        # rank 0 alone looks, and tells: the test is a collective, which all ranks or none must enter
        with raise_on_all_ranks(trainer.parts.world, "looking for the test's result"):
            if trainer.parts.world.is_main:
                missing = not is_tested(trainer.parts, run_dir.path)
        missing = bool(agree(trainer.parts.world, missing))
    decision = Decision(reason, is_interrupted=False)
    return _finish(trainer, run_dir, decision, test=missing)


def _finish(trainer: Trainer, run_dir: RunDir, decision: Decision, *, test: bool) -> Decision:
    """Run the final test, unless a stop was requested, and log the end of the run."""
    if test and not decision.is_interrupted:
        weights = trainer.parts.config.test.weights
        if run_final_test(trainer.state, trainer.parts, run_dir.path, weights=weights) is None:
            decision = trainer.parts.sync.decision()
    trainer.parts.sync.answer("stop")
    trainer.parts.logger.log_end(
        trainer.state.progress, decision, trainer.state.metrics.best, run_dir.path
    )
    return decision


def _raise_unless_ended(decision: Decision, run: OpenRun) -> None:
    """Raise RunFailed or Interrupted if the run did not reach its end."""
    if decision.is_failure:
        raise RunFailed(
            f"{decision.reason}; saved at step {run.trainer.state.step:,}: correct this, then resume with: "
            f"instar resume {run.run_dir.shell_word}"
        )
    if decision.is_interrupted:
        raise Interrupted(f"resume with: instar resume {run.run_dir.shell_word}")
