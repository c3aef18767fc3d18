"""Third phase of a run: its folder, its record and its trainer, which stands where the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from instar.checkpoint.listing import update_pointer
from instar.checkpoint.manifest import line_of_start, write_line
from instar.checkpoint.store import LATEST, Checkpoint
from instar.config.origins import DERIVED, config_text, in_yaml
from instar.config.schema import RunConfig
from instar.config.sections import Operation
from instar.distributed.agree import agree, raise_on_all_ranks
from instar.distributed.failure import STOPPED, PeerError, describe_failure, exit_code_of
from instar.distributed.rank_log import RankLog
from instar.distributed.world import remember
from instar.logs.read.cache import columns_written
from instar.models.shape import count_parameters
from instar.processes.identity import this_process
from instar.record.alerts import AlertSink, Notifier, Rules
from instar.record.atomic import replace_file, sweep
from instar.record.console import Console
from instar.record.control import Inbox
from instar.record.events import Failed, RecordError, RunStarted
from instar.record.recorder import Recorder, Silent, Sink
from instar.record.rundir import RunDir, create_run_dir, hold
from instar.record.start_folder import note_start
from instar.record.system import machine, versions
from instar.record.trackers.sink import TrackerSink
from instar.record.trackers.tracker import TrackedRun, configured_trackers
from instar.run.changes.requests import take_in_at_start
from instar.run.changes.scheduled import check_ahead
from instar.run.components import Components
from instar.run.output.operation_text import format_shape
from instar.run.resume import DERIVES
from instar.run.start.build import RunOutputs, build_trainer
from instar.run.start.plan import RankContext, RunPlan
from instar.run.start.restore import replay_history, restore
from instar.run.trainer import Trainer
from instar.schedule.operations import Change, keeps_training_loss_comparable
from instar.schedule.settings import early_end_of_decay

logger = logging.getLogger(__name__)

_last_trainer: list[Trainer] = []
"""The last multi-rank trainer, kept until the process ends or trains again. DDP's reducer may hold
the last reference to the transport, whose destructor joins its threads while it holds the GIL, for
which these may wait: a deadlock. By the time of another run the threads have ended."""


@dataclass(frozen=True)
class OpenRun:
    """A run whose trainer is ready for its next step."""

    run_dir: RunDir
    trainer: Trainer
    end: str | None
    """why nothing is left to train in it; None: it trains on"""


def open_run(plan: RunPlan, rank: RankContext) -> OpenRun:
    """Create or take the run's folder, open its record, build its trainer, and resume. A collective.

    Raises:
        RunDirBusy: another process is training in the run's folder.
        CheckpointError: the checkpoint is of another model or of other data.
    """
    request, checkpoint = plan.run.request, plan.run.checkpoint
    run_dir = _open_folder(plan, rank)
    sink, recorder = _open_record(plan, run_dir, rank)
    trainer = build_trainer(
        plan.prepared_run,
        rank.world,
        RunOutputs(rank.signal, sink, rank.console, rank.log, run_dir),
        plan.initial,
        rank.weights,
        request.hooks,
    )
    rank.weights = None  # it may hold them
    if recorder is not None:
        trainer.parts.sync.failing = partial(_failure, recorder, trainer.parts)
    if rank.world.size > 1:
        _last_trainer.append(trainer)
    rank.live.enter_context(closing(trainer))
    _resume(plan, trainer, run_dir)
    rank.signal.resumable = rank.signal.resumable or checkpoint is not None
    end = trainer.over() if checkpoint is not None and not request.only_test else None
    _check_rest(plan, trainer, trains=end is None and not request.only_test)
    if not request.only_test:
        _begin_line(trainer, checkpoint, run_dir)
    run = OpenRun(run_dir, trainer, end)
    _log_start(plan, run)
    return run


def forget_last_trainer() -> None:
    """Let go of the trainer of this process's last run."""
    _last_trainer.clear()


def _open_folder(plan: RunPlan, rank: RankContext) -> RunDir:
    """Create the folder of a new run, lock it for rank 0, and write all ranks' logs there. A collective."""
    resume, world = plan.run.resume, rank.world
    run_dir = resume.run if resume else _agree_on_run_dir(plan, rank)
    with raise_on_all_ranks(world, "taking the run's folder"):
        if world.is_main:
            # one lock for all ranks, held by rank 0 until the record is closed: two runs would mix their events
            if resume is None:
                rank.record.enter_context(hold(run_dir, rank.console.warn))
                Inbox(run_dir.control).clear()
            note_start(run_dir)
            for folder in (run_dir.path, run_dir.checkpoints):
                sweep(folder)
    rank.log.open(run_dir.path)
    logger.info("rank %d of %d on %s", world.rank, world.size, world.device)
    if plan.precision_reason:
        precision = plan.prepared_run.config.precision
        logger.info("precision: auto is %s: %s", precision, plan.precision_reason)
    return run_dir


def _agree_on_run_dir(plan: RunPlan, rank: RankContext) -> RunDir:
    """Create the run's folder with the resolved config on rank 0; return it on all ranks.

    A collective.
    """
    prepared_run, world, path = plan.prepared_run, rank.world, ""
    with raise_on_all_ranks(world, "making the run's folder"):
        if world.is_main:
            run_dir = create_run_dir(
                prepared_run.config.record,
                prepared_run.config.name,
                lambda folder: _write_config(folder, plan, plan.run.loaded_config.origins),
            )
            for name, file in prepared_run.spec.run_files.items():
                replace_file(run_dir.path / name, file.read_bytes())
            path = str(run_dir.path)
            remember(plan.run.request.launch_key, str(run_dir.path.absolute()))
    return RunDir(Path(str(agree(world, path))))


def _write_config(run_dir: RunDir, plan: RunPlan, origins: Mapping[str, str]) -> None:
    origins = {**origins, **dict.fromkeys(plan.prepared_run.derived_values, DERIVED)}
    replace_file(run_dir.config, config_text(plan.prepared_run.config, origins).encode())


def _open_record(plan: RunPlan, run_dir: RunDir, rank: RankContext) -> tuple[Sink, Recorder | None]:
    """Open the sink of all events, on rank 0, and record from here on why the run fails. A collective."""
    sink: Sink = Silent()
    recorder: Recorder | None = None
    with raise_on_all_ranks(rank.world, "opening the record"):
        if rank.world.is_main:
            rank.record.enter_context(columns_written(run_dir))
            recorder = Recorder(run_dir.events, warn=rank.console.warn)
            sink = _with_trackers(recorder, run_dir, plan.prepared_run.config, rank.console)
    rank.record.enter_context(closing(sink))
    rank.record.enter_context(_recorded_failure(sink, rank.log))
    return sink, recorder


def _with_trackers(
    recorder: Recorder, run_dir: RunDir, config: RunConfig, console: Console
) -> Sink:
    """Return the sink of all events: the record, the trackers, and the alerts."""
    sink: Sink = recorder
    if trackers := configured_trackers(config.record.trackers):
        tracked_run = TrackedRun.live(run_dir.path, config.model_dump(mode="json"))
        sink = TrackerSink(sink, trackers, tracked_run, console.warn)
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


def _failure(recorder: Recorder, parts: Components) -> str | None:
    """Return why rank 0 cannot continue: what the run writes cannot be written; None: it can."""
    reasons = (recorder.failure(), *(extension.failure for extension in parts.extensions))
    return next(filter(None, reasons), None)


def _resume(plan: RunPlan, trainer: Trainer, run_dir: RunDir) -> None:
    """Restore the checkpoint of a resumed run. A collective."""
    run = plan.run
    if run.resume is None or run.continuation is None:
        return
    resume_from(
        trainer,
        run.checkpoint,
        run.continuation.operation,
        allow=run.resume.allow,
        warnings=run.warnings,
    )
    if trainer.parts.world.is_main and not run.request.only_test:
        name = run.checkpoint.path.name if run.checkpoint else ""
        remember(run.request.launch_key, f"{run_dir.path.absolute()}\n{name}")


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
            trainer.state, restore_warnings = restore(
                trainer.state, trainer.parts, checkpoint, override=override, allow=allow
            )
            messages += restore_warnings
    elif override is not None:
        with raise_on_all_ranks(world, "applying new values"):
            change = Change(override, 0, 0, reason="set at resume")
            trainer.state = replay_history(trainer.state, trainer.parts, (change,))
    for warning in messages:
        trainer.parts.logger.warn(warning, trainer.state.step)


def _check_rest(plan: RunPlan, trainer: Trainer, *, trains: bool) -> None:
    """Take in what people asked for meanwhile, and check the rest of the schedule of a resumed run. A collective.

    Args:
        trains: False: the run makes no step, and what was asked for goes on waiting.
    """
    run, parts = plan.run, trainer.parts
    if run.continuation is None:
        return
    if trains:
        trainer.state = take_in_at_start(
            trainer.state, parts, has_other_schedule=run.continuation.sets_schedule
        )
    if run.checkpoint is not None:
        with raise_on_all_ranks(parts.world, "checking the rest of the schedule"):
            check_ahead(trainer.state, parts)


def _begin_line(trainer: Trainer, checkpoint: Checkpoint | None, run_dir: RunDir) -> None:
    """Start a new line of the run at `checkpoint`; later checkpoints are then on a branch.

    A collective.
    """
    with raise_on_all_ranks(trainer.parts.world, "writing the run's line"):
        if trainer.parts.world.is_main:
            manifest = checkpoint.manifest if checkpoint is not None else None
            trainer.parts.line = line_of_start(manifest)
            write_line(run_dir.path, trainer.parts.line)
            if checkpoint is not None:
                update_pointer(run_dir.path, LATEST, checkpoint.path)


def _log_start(plan: RunPlan, run: OpenRun) -> None:
    """Log that the run starts, with what its resume changes, and its warnings."""
    continuation, trainer = plan.run.continuation, run.trainer
    run_logger, only_test = trainer.parts.logger, plan.run.request.only_test
    run_logger.log_start(_start_event(plan, run), run.run_dir.path, only_test=only_test)
    stepper = trainer.parts.stepper
    with stepper.autocast():
        of_task = trainer.parts.task.start_warnings(stepper.unwrapped_model)
    for warning in (*plan.warnings, *of_task):
        run_logger.warn(warning, trainer.state.step)
    if run_logger.peak is not None and (slow := run_logger.peak.warning):
        run_logger.warn(slow, trainer.state.step)
    if continuation is None:
        return
    if not only_test and run.end is None:
        run_logger.log_override(trainer.state.progress, continuation.changes)
        steps = plan.prepared_run.forecast.steps if "train.until" in continuation.changes else None
        is_set = DERIVES in continuation.changes
        if note := early_end_of_decay(trainer.state.settings, steps, is_set=is_set):
            run_logger.console.say(note)
    for key, value in continuation.launch.items():
        run_logger.console.say(f"{key}: {in_yaml(value)}, for this process")


def _start_event(plan: RunPlan, run: OpenRun) -> RunStarted:
    trainer, prepared_run, continuation = run.trainer, plan.prepared_run, plan.run.continuation
    world, config = trainer.parts.world, trainer.parts.config
    facts = machine(str(world.device) if world.device.type == "cpu" else "cuda")
    name = str(facts.get("gpu", "cpu"))
    strategy = [config.parallel.strategy.upper()] if config.parallel.strategy != "ddp" else []
    how = [*strategy, "elastic"] if config.reproducible == "elastic" else strategy or ["DDP"]
    shape = trainer.state.in_force.architecture
    return RunStarted(
        run_id=run.run_dir.id,
        step=trainer.state.step,
        resumed_from=plan.run.checkpoint.path.name if plan.run.checkpoint else None,
        launch=dict(continuation.launch) if continuation else {},
        model=format_shape(shape),
        parameters=count_parameters(shape).total,
        devices=name if world.size == 1 else f"{world.size}×{name} {' '.join(how)}",
        world_size=world.size,
        unit=prepared_run.spec.unit,
        better=dict(prepared_run.config.metrics),
        best_metric=prepared_run.config.checkpoint.best_of[0],
        architecture=shape.to_dict(),
        splits=dict(prepared_run.forecast.splits),
        drawing=prepared_run.forecast.drawing,
        versions=versions(),
        machine=facts | this_process(),
    )
