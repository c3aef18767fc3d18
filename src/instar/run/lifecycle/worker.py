"""One rank of a run: join the process group, agree on the run, build it, train, save, leave."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import cast

from instar.checkpoint.line import continued, line_of, write_line
from instar.checkpoint.listing import point
from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import LATEST, Checkpoint, load
from instar.config.errors import InstarError
from instar.config.load import Loaded
from instar.config.origins import DERIVED, in_yaml, resolved
from instar.config.schema import RunConfig
from instar.config.sections import Operation
from instar.distributed.agree import agree, raise_on_all_ranks
from instar.distributed.failure import (
    STOPPED,
    Interrupted,
    PeerError,
    RunFailed,
    describe_failure,
    exit_code_of,
    exits_fail,
    point_to_log,
    stopped_before_start,
)
from instar.distributed.rank_log import RankLog
from instar.distributed.signals import StopSignal, training_started
from instar.distributed.world import World, join, recall, remember
from instar.logs.read.cache import columns_kept
from instar.models.shape import count_parameters
from instar.processes.identity import this_process
from instar.record.alerts import AlertSink, Notifier, Rules
from instar.record.atomic import finish_deleting, replace_file, sweep
from instar.record.console import Console, open_console, silent_console
from instar.record.control import Inbox
from instar.record.events import Failed, RecordError, RunStarted
from instar.record.progress import Display, showing
from instar.record.recorder import Recorder, Silent, Sink
from instar.record.rundir import RunDir, create_run_dir, hold
from instar.record.start_folder import note_start
from instar.record.system import gpu_bytes, machine, versions
from instar.record.trackers.configured import configured
from instar.record.trackers.sink import TrackerSink
from instar.record.trackers.tracker import TrackedRun
from instar.run.changes.branching import unfinished_branches
from instar.run.changes.scheduled import check_ahead
from instar.run.lifecycle.best_pointers import update_best_pointers
from instar.run.lifecycle.build import build
from instar.run.lifecycle.compile_stages import compile_stages
from instar.run.lifecycle.inputs import (
    check_folder_is_shared,
    compare_configs,
    compare_inputs,
    resolve_precision,
    resolve_strategy,
)
from instar.run.lifecycle.preflight import Prepared, check_memory, preflight, prepare_data
from instar.run.lifecycle.restore import replay, restore
from instar.run.lifecycle.resume import (
    LAUNCH_KEY,
    Continuation,
    Resume,
    automatic,
    branch_of,
    choose,
    continuation,
)
from instar.run.lifecycle.start import starting_weights
from instar.run.lifecycle.test_phase import final_test, is_tested
from instar.run.lifecycle.trial import run_trial, try_sizes
from instar.run.lifecycle.weights import OpenedWeights, open_weights
from instar.run.loop.checkpointing import finish_deltas
from instar.run.loop.components import Components
from instar.run.loop.hooks import check_hooks
from instar.run.loop.state import Decision
from instar.run.loop.sync_point import SyncPoint
from instar.run.loop.trainer import Trainer
from instar.run.output.operation_text import shape_text
from instar.run.output.profile import StepProfiler
from instar.run.parallel.micro_batch_sizes import sizes_ahead
from instar.schedule.operations import Change, State, initial_state, keeps_training_loss_comparable
from instar.schedule.settings import early_end_of_decay
from instar.tasks.task import spec_class

logger = logging.getLogger(__name__)


DELETING_S = 60.0
"""Longest wait of a finished run for the deletion of old checkpoints, in seconds. Any that are left
are deleted when the run is resumed."""

_last_trainer: list[object] = []
"""The last multi-rank trainer, kept until the process ends or trains again. DDP's reducer may hold
the last reference to the transport, whose destructor joins its threads while it holds the GIL, for
which these may wait: a deadlock. By the time of another run the threads have ended."""

_calls = count()
"""Number of calls of `run` in this process. A script may train in a loop: each call is a run of its
own, which is found again after the launcher has restarted the script."""


def run(
    loaded: Loaded,
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
        hooks: called during training, see `instar.run.loop.hooks`.

    Raises:
        ConfigError: the run cannot start; nothing was created.
        CheckpointError: there is no intact checkpoint to resume from, or it is of another run.
        RunDirBusy: another process is training in the run's folder.
        RunFailed: the run started and cannot continue.
        Interrupted: a stop was requested, and all ranks stopped at the same step.
    """
    launch_key = f"{LAUNCH_KEY}/{next(_calls)}"

    def train(config: Loaded, how: Resume | None, key: str, *, profile: int = 0) -> Family:
        wait_s = 0.5
        _last_trainer.clear()
        try:
            with exits_fail("the task's code"):
                left = _run_rank(
                    config,
                    log,
                    signal,
                    how,
                    only_test=only_test,
                    profiled=profile,
                    hooks=hooks,
                    launch_key=key,
                )
            # only after success: otherwise a scheduler or other ranks wait for this one to end
            wait_s = DELETING_S
            return left
        finally:
            finish_deleting(wait_s)
            if log.path is not None and log.rank == 0 and config.config.record.report:
                _report(RunDir(log.path.parent.parent))

    left = train(loaded, resume, launch_key, profile=profiled_steps)
    assert log.path is not None
    folder, path, has_branches = log.path.parents[1], log.path, bool(left)
    while left:
        (branch, config), *left = left
        try:
            left = [*train(config, Resume(branch), f"{launch_key}/{branch.path.name}"), *left]
        except Interrupted:
            raise Interrupted(f"resume with: instar resume {RunDir(folder).quoted}") from None
        point_to_log(path, os.environ)
    if has_branches and log.rank == 0 and loaded.config.record.report:
        _report(RunDir(folder))  # which shows how its branches have ended
    return folder


Family = list[tuple[RunDir, Loaded]]
"""Branches, with their configs."""


def _report(run_dir: RunDir) -> None:
    """Write the run's HTML report; a failure is only a warning."""
    try:
        from instar.logs.web.report import write_report

        write_report(run_dir)
    except Exception as error:
        logger.warning("no report: %s: %s", type(error).__name__, error)


def _run_rank(
    loaded: Loaded,
    log: RankLog,
    signal: StopSignal,
    resume: Resume | None,
    *,
    only_test: bool,
    profiled: int,
    hooks: Sequence[object],
    launch_key: str,
) -> Family:
    """Train one run, and return its branches that are left to train."""
    with (
        ExitStack() as record,  # outlives the process group, which knows at its end who was lost
        join(loaded.config.parallel, loaded.config.device) as world,
        ExitStack() as stack,
    ):
        console = open_console() if world.is_main else silent_console()
        record.enter_context(closing(console))
        display = Display(lambda: console.screen, owns=False) if world.is_main else None
        record.enter_context(showing(display))
        compare_configs(loaded.config, world)
        requested = resume
        resume, before = _agree_to_resume(loaded, resume, world, launch_key)
        check_folder_is_shared(resume.run if resume else None, loaded.config.record, world)
        start, resumed, warnings = None, None, list[str]()
        if resume is not None:
            start, warnings = _choose(resume, world)
            if start is None:
                console.say(f"{resume.run.path}: nothing was saved yet; the run starts again")
            if requested is not None and start is not None and start.path.name == before:
                # restarted before a new save: the changes are not in the checkpoint's history yet
                resume = replace(resume, by_person=requested.by_person)
            with raise_on_all_ranks(world, "reading the config of the resumed run"):
                resumed = continuation(resume, loaded, start)
                loaded = resumed.loaded
        world.at("preparing data")
        with raise_on_all_ranks(world, "preparing data"):
            if world.is_main:
                prepare_data(loaded, world.size, console.say)
        initial: State | None = None
        with raise_on_all_ranks(world, "checking the config"):
            prepared = preflight(loaded, world.size, new=resume is None)
        chosen = resolve_strategy(loaded, prepared, world)
        with raise_on_all_ranks(world, "checking the config"):
            if chosen is not loaded:
                loaded, prepared = chosen, preflight(chosen, world.size, new=resume is None)
            of_gpu, here = gpu_bytes(world.device), world.local_size
            check_memory(loaded, prepared.forecast, world.device.type, of_gpu, here)
        derived, reason = set(prepared.derived), ""
        if prepared.config.precision == "auto":
            prepared, reason = resolve_precision(prepared, world)
            loaded = replace(loaded, origins={**loaded.origins, "precision": f"auto: {reason}"})
            derived.add("precision")
        with raise_on_all_ranks(world, "checking the config"):
            if resumed is not None:
                resumed = resumed.resolved(prepared.config, derived)
                initial = _initial_state(resumed, prepared, world)
            # a run that has saved has its own
            weights = starting_weights(loaded, prepared.spec) if start is None else None
        opened: OpenedWeights | None = None
        if weights is not None:
            world.at("reading the starting weights")
            with raise_on_all_ranks(world, "reading the starting weights"):
                if world.is_main:
                    console.say(f"starting from {weights.about}")
                    opened = open_weights(weights, prepared.spec.architecture)
        # a run in a folder that `resume: auto` names can always be resumed
        is_resumed = start is not None
        signal.resumable = is_resumed or loaded.config.resume == "auto"
        world.at("comparing the ranks' inputs")
        compare_inputs(prepared, world)
        world.at("trying one micro-batch")
        with raise_on_all_ranks(world, "trying one micro-batch"):
            if resumed is None or initial is None:
                start_warnings = [*prepared.warnings, *run_trial(prepared, world)]
            else:
                saved = start.state.get("progress", {}) if start is not None else {}
                past = resumed.history, resumed.operation, saved
                ahead = sizes_ahead(initial, *past, prepared.spec, world.size)
                start_warnings = try_sizes(prepared, world, ahead)
        check_hooks([*prepared.spec.task(prepared.config).hooks(), *hooks], world)
        if SyncPoint(world, signal).sync():
            raise stopped_before_start(resumable=signal.resumable)
        signal.started = True
        run_dir = resume.run if resume else _agree_on_run_dir(prepared, loaded, world, launch_key)
        with raise_on_all_ranks(world, "taking the run's folder"):
            if world.is_main:
                record.enter_context(hold(run_dir, console.warn))
                note_start(run_dir)
                Inbox(run_dir.control).clear()
                for folder in (run_dir.path, run_dir.checkpoints):
                    sweep(folder)
        log.open(run_dir.path)
        logger.info("rank %d of %d on %s", world.rank, world.size, world.device)
        if reason:
            logger.info("precision: auto is %s: %s", prepared.config.precision, reason)
        sink: Sink = Silent()
        recorder: Recorder | None = None
        with raise_on_all_ranks(world, "opening the record"):
            if world.is_main:
                record.enter_context(columns_kept(run_dir))
                recorder = Recorder(run_dir.events, warn=console.warn)
                sink = _record(recorder, run_dir, prepared.config, console)
        record.enter_context(closing(sink))
        record.enter_context(_recorded_failure(sink, log))
        trainer = build(
            prepared, world, signal, sink, console, log, run_dir, initial, opened, hooks
        )
        del opened  # it may hold them
        if recorder is not None:
            trainer.parts.sync.failing = partial(_failure, recorder, trainer.parts)
        if world.size > 1:
            _last_trainer.append(trainer)
        stack.enter_context(closing(trainer))
        if resume is not None and resumed is not None:
            resume_from(trainer, start, resumed.operation, allow=resume.allow, warnings=warnings)
            if world.is_main and not only_test:
                name = start.path.name if start else ""
                remember(launch_key, f"{run_dir.path.absolute()}\n{name}")
        signal.resumable = signal.resumable or start is not None
        over = trainer.over() if start is not None and not only_test else None
        if not only_test:
            _begin_line(trainer, start, run_dir)
        event = _started(trainer, prepared, run_dir, start, resumed)
        trainer.parts.logger.opened(event, run_dir.path, only_test=only_test)
        for warning in start_warnings:
            trainer.parts.logger.warn(warning, trainer.state.step)
        if trainer.parts.logger.peak is not None and (slow := trainer.parts.logger.peak.warning):
            trainer.parts.logger.warn(slow, trainer.state.step)
        if resumed is not None and not only_test and over is None:
            trainer.parts.logger.overridden(trainer.state.progress, resumed.changed)
            steps = prepared.forecast.steps if "train.until" in resumed.changed else None
            if note := early_end_of_decay(trainer.state.settings, steps):
                console.say(note)
        if resumed is not None:
            for key, value in resumed.launch.items():
                console.say(f"{key}: {in_yaml(value)}, for this process")
        if only_test:
            name = start.path.name if start else "last"
            if final_test(trainer.state, trainer.parts, run_dir.path, weights=name) is None:
                raise Interrupted(f"again: instar test {run_dir.quoted}")
            return []
        if start is not None:
            update_best_pointers(trainer.state, trainer.parts, start.path)
        if profiled and over is None:
            profiler = StepProfiler(
                profiled, run_dir.profile(world.rank), world.device, console.say
            )
            stack.enter_context(closing(profiler))
            trainer.around_step = profiler.step
        decision = (
            _train_to_end(trainer, run_dir)
            if over is None
            else _end_complete_run(trainer, run_dir, over)
        )
        left = Family()
        if not decision.interrupted:
            left = unfinished_branches(trainer.state, trainer.parts, run_dir.path)
    if decision.failed:
        raise RunFailed(
            f"{decision.reason}; saved at step {trainer.state.step:,}: correct this, then resume with: "
            f"instar resume {run_dir.quoted}"
        )
    if decision.interrupted:
        raise Interrupted(f"resume with: instar resume {run_dir.quoted}")
    return left


def _failure(recorder: Recorder, parts: Components) -> str | None:
    """Return why rank 0 cannot continue: what the run writes cannot be written; None: it can."""
    return recorder.failure() or (None if parts.deltas is None else parts.deltas.failure)


def _record(recorder: Recorder, run_dir: RunDir, config: RunConfig, console: Console) -> Sink:
    """Return the sink of all events: the record, the trackers, and the alerts."""
    sink: Sink = recorder
    if trackers := configured(config.record.trackers):
        tracked = TrackedRun.live(run_dir.path, config.model_dump(mode="json"))
        sink = TrackerSink(sink, trackers, tracked, console.warn)
    alerts = config.record.alerts
    notifier = Notifier(run_dir, alerts.argv, alerts.webhook)
    return AlertSink(sink, Rules(alerts, keeps_training_loss_comparable), notifier, console.warn)


@contextmanager
def _recorded_failure(sink: Sink, log: RankLog) -> Iterator[None]:
    """Context manager that records why a run failed.

    The launcher is informed first, because closing the record may take a while. The record's last
    event is the failure, unless the run was stopped on request.
    """
    try:
        yield
    except BaseException as error:
        log.record_failure(error)
        code = exit_code_of(error)
        if code not in (0, *STOPPED):
            failure = describe_failure(error, log.rank, log.step)
            rank = error.rank if isinstance(error, PeerError) else log.rank
            with suppress(RecordError):
                sink.write(
                    Failed(message=failure.sentence(), rank=rank, step=log.step, exit_code=code)
                )
        raise


def _begin_line(trainer: Trainer, start: Checkpoint | None, run_dir: RunDir) -> None:
    """Start a new line of the run at `start`; later checkpoints are then on a branch.

    A collective.
    """
    with raise_on_all_ranks(trainer.parts.world, "writing the run's line"):
        if trainer.parts.world.is_main:
            trainer.parts.line = continued(start.manifest if start is not None else None)
            write_line(run_dir.path, trainer.parts.line)
            if start is not None:
                point(run_dir.path, LATEST, start.path)


def _train_to_end(trainer: Trainer, run_dir: RunDir) -> Decision:
    """Train, save and test; return why the run ended."""
    training_started()
    try:
        compile_stages(trainer.state, trainer.parts)
        outcome = trainer.train()
        lost: InstarError | None = None
        if not outcome.decision.failed:
            try:
                finish_deltas(trainer.state, trainer.parts)
            except (CheckpointError, PeerError) as error:
                lost = error  # without a delta, there is a checkpoint still
        trainer.save(outcome.decision.reason, must=True)
        if lost is not None:
            raise lost
    except BaseException:
        trainer.parts.saver.abandon()
        if trainer.parts.world.size == 1:  # with several ranks, a collective could hang
            with suppress(Exception):
                trainer.parts.logger.flush_interval(trainer.state.progress)
        raise
    return _finish(trainer, run_dir, outcome.decision, test=trainer.parts.config.test.at_end)


def _end_complete_run(trainer: Trainer, run_dir: RunDir, reason: str) -> Decision:
    """End a resumed run that is complete: save nothing, and run the final test only if missing."""
    go_on = f"set a later end, e.g.: instar resume {run_dir.quoted} --until {2 * max(1, trainer.state.step)}it"
    if not Decision(reason, interrupted=False).is_budget:
        go_on = (
            "give early_stopping.rules more patience, or leave them out: "
            f"instar resume {run_dir.quoted} --set early_stopping=null"
        )
    trainer.parts.logger.console.say(
        f"{reason}: nothing is left to train in it, and nothing was saved or set; to continue, {go_on}"
    )
    # an earlier process may have ended between its last checkpoint and its last delta
    finish_deltas(trainer.state, trainer.parts)
    missing = False
    if trainer.parts.config.test.at_end:
        with raise_on_all_ranks(trainer.parts.world, "looking for the test's result"):
            if trainer.parts.world.is_main:
                missing = not is_tested(trainer.parts, run_dir.path)
        missing = bool(agree(trainer.parts.world, missing))
    decision = Decision(reason, interrupted=False)
    return _finish(trainer, run_dir, decision, test=missing)


def _finish(trainer: Trainer, run_dir: RunDir, decision: Decision, *, test: bool) -> Decision:
    """Run the final test, unless a stop was requested, and log the end of the run."""
    if test and not decision.interrupted:
        weights = trainer.parts.config.test.weights
        if final_test(trainer.state, trainer.parts, run_dir.path, weights=weights) is None:
            decision = trainer.parts.sync.decision()
    trainer.parts.sync.answer("stop")
    trainer.parts.logger.closed(
        trainer.state.progress, decision, trainer.state.metrics.best, run_dir.path
    )
    return decision


def _choose(resume: Resume, world: World) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that rank 0 chooses (None: nothing saved yet), and warnings.

    A collective. The warnings say why later checkpoints were passed over.

    Raises:
        CheckpointError: there is no intact checkpoint.
    """
    path, warnings = "", list[str]()
    with raise_on_all_ranks(world, "choosing a checkpoint"):
        if world.is_main:
            chosen, skipped = choose(resume)
            path = str(chosen.path) if chosen else ""
            warnings = [f"passed over: {error}" for error in skipped]
            left_at_step = chosen and branch_of(chosen.path, line_of(resume.run.path))
            if chosen is not None and left_at_step is not None:
                warnings.append(
                    f"{chosen.path.name} lies on a branch that the run left at step {left_at_step:,}"
                )
    path = str(agree(world, path))
    if not path:
        return None, warnings
    with raise_on_all_ranks(world, "reading the checkpoint"):
        # rank 0 has just read every byte of it
        return load(Path(path), check=False), warnings


def resume_from(
    trainer: Trainer,
    checkpoint: Checkpoint | None,
    override: Operation | None = None,
    *,
    allow: Collection[str] = (),
    warnings: Sequence[str] = (),
) -> None:
    """Restore a checkpoint and apply what the resume changes. A collective.

    Args:
        checkpoint: None: nothing saved yet.
        override: the settings that the resume changes.
        allow: see `restore`.
        warnings: logged together with those of `restore`.

    Raises:
        CheckpointError: the checkpoint is of another model or of other data.
    """
    world = trainer.parts.world
    messages = list(warnings)
    if checkpoint is not None:
        with raise_on_all_ranks(world, "restoring the checkpoint"):
            trainer.state, found = restore(
                trainer.state, trainer.parts, checkpoint, override=override, allow=allow
            )
            messages += found
        with raise_on_all_ranks(world, "checking the rest of the schedule"):
            check_ahead(trainer.state, trainer.parts)
    elif override is not None:
        with raise_on_all_ranks(world, "applying new values"):
            change = Change(override, 0, 0, reason="set at resume")
            trainer.state = replay(trainer.state, trainer.parts, (change,))
    for warning in messages:
        trainer.parts.logger.warn(warning, trainer.state.step)


def _initial_state(resumed: Continuation, prepared: Prepared, world: World) -> State:
    """Return settings and architecture at the run's step 0."""
    spec, began = prepared.spec, resumed.began
    if began.model != prepared.config.model:
        config = prepared.config.model_copy(update={"model": began.model})
        first = replace(resumed.loaded, config=config)
        spec = spec_class(config.task).open(first, world.size)
    return initial_state(began, spec.architecture)


def _agree_to_resume(
    loaded: Loaded, resume: Resume | None, world: World, launch_key: str
) -> tuple[Resume | None, str]:
    """Find the run to resume, on rank 0. A collective.

    It is the requested one, that of `resume: auto`, or the run that this launch started or resumed
    before its ranks were restarted.

    Returns:
        the resume, and the name of the checkpoint from which this launch resumed before, or "".
    """
    answer = ["", ""]
    with raise_on_all_ranks(world, "looking for the run"):
        if world.is_main:
            folder, _, before = (recall(launch_key) or "").partition("\n")
            if folder or resume is None:
                found = automatic(loaded.config, folder or None)
                answer = [str(found.run.path) if found else "", before]
    folder, before = map(str, cast("list[str]", agree(world, answer)))
    if not folder:
        return resume, before
    return replace(
        resume or Resume(RunDir(Path(folder)), given=True),
        run=RunDir(Path(folder)),
        start=LATEST,
        fresh=True,
        by_person=False,
    ), before


def _agree_on_run_dir(prepared: Prepared, loaded: Loaded, world: World, launch_key: str) -> RunDir:
    """Create the run's folder with the resolved config on rank 0; return it on all ranks.

    A collective.
    """
    path = ""
    with raise_on_all_ranks(world, "making the run's folder"):
        if world.is_main:
            made = create_run_dir(
                prepared.config.record,
                prepared.config.name,
                lambda run: _write_config(run, prepared, loaded.origins),
            )
            for name, file in prepared.spec.kept.items():
                replace_file(made.path / name, file.read_bytes())
            path = str(made.path)
            remember(launch_key, str(made.path.absolute()))
    return RunDir(Path(str(agree(world, path))))


def _write_config(run_dir: RunDir, prepared: Prepared, origins: Mapping[str, str]) -> None:
    origins = {**origins, **dict.fromkeys(prepared.derived, DERIVED)}
    replace_file(run_dir.config, resolved(prepared.config, origins).encode())


def _started(
    trainer: Trainer,
    prepared: Prepared,
    run_dir: RunDir,
    start: Checkpoint | None,
    resumed: Continuation | None,
) -> RunStarted:
    world = trainer.parts.world
    device = str(world.device) if world.device.type == "cpu" else "cuda"
    facts = machine(device)
    name = str(facts.get("gpu", "cpu"))
    config = trainer.parts.config
    how = [config.parallel.strategy.upper()] if config.parallel.strategy != "ddp" else []
    how = [*how, "elastic"] if config.reproducible == "elastic" else how or ["DDP"]
    shape = trainer.state.in_force.architecture
    return RunStarted(
        run_id=run_dir.id,
        step=trainer.state.step,
        resumed_from=start.path.name if start else None,
        launch=dict(resumed.launch) if resumed else {},
        model=shape_text(shape),
        parameters=count_parameters(shape).total,
        devices=name if world.size == 1 else f"{world.size}×{name} {' '.join(how)}",
        world_size=world.size,
        unit=prepared.spec.unit,
        better=dict(prepared.config.metrics),
        best_metric=prepared.config.checkpoint.best_of[0],
        architecture=shape.to_dict(),
        splits=dict(prepared.forecast.splits),
        versions=versions(),
        machine=facts | this_process(),
    )
