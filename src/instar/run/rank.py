"""One rank's life: join the others, agree on the run, build it, train, save, leave."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from instar.checkpoint.disk import replace_file, sweep
from instar.checkpoint.store import load, point
from instar.config.dump import resolved
from instar.config.load import Loaded
from instar.config.schema import RunConfig
from instar.config.written import DERIVED, lines_of, origins_of
from instar.distributed.agree import agree, together
from instar.distributed.failure import (
    NOTHING_STARTED,
    Interrupted,
    PeerError,
    describe,
    exit_code_of,
)
from instar.distributed.ranklog import RankLog
from instar.distributed.signals import StopSignal
from instar.distributed.world import World, join, recall, remember
from instar.models.shape import count_parameters
from instar.record.alerts import Rules
from instar.record.console import Console, open_console, silent_console
from instar.record.control import Inbox
from instar.record.events import Failed, RecordError, RunStarted
from instar.record.notify import Notifier
from instar.record.recorder import Recorder, Silent, Sink
from instar.record.rundir import RunDir, create_run_dir, hold
from instar.record.system import machine, versions
from instar.record.watched import Watched
from instar.run.build import build
from instar.run.changes import check_ahead
from instar.run.final import final_test
from instar.run.judge import LOSS
from instar.run.preflight import Prepared, preflight, prepare_data
from instar.run.resume import LAUNCH_KEY, Resume, automatic, choose, overridden
from instar.run.safepoint import SafePoint
from instar.run.snapshot import take_up
from instar.run.tell import shape_text
from instar.run.trainer import Trainer
from instar.trackers.configured import configured
from instar.trackers.mirror import Mirror
from instar.trackers.tracker import TrackedRun

logger = logging.getLogger(__name__)

_kept: list[object] = []
"""What must live as long as the process. DDP's reducer may hold the last reference to the transport,
whose end waits for its threads without letting go of the interpreter, which these may wait for."""


def run(
    loaded: Loaded,
    log: RankLog,
    signal: StopSignal,
    resume: Resume | None = None,
    *,
    only_test: bool = False,
) -> None:
    """Train as one rank of the world that the environment describes.

    Args:
        resume: how a run goes on; None: a new run, unless the config or a restart says otherwise.
        only_test: make no step, but the final test of the checkpoint that `resume` names.

    Raises:
        ConfigError: the run cannot start; nothing was made.
        CheckpointError: there is nothing whole to go on from, or it is of something else.
        RunDirBusy: another process is training in its folder.
        RunFailed: it started and cannot go on.
        Interrupted: a signal asked it to stop, and all ranks did, at the same step.
    """
    try:
        _live(loaded, log, signal, resume, only_test=only_test)
    finally:
        if log.path is not None and log.rank == 0 and loaded.config.record.report:
            _report(RunDir(log.path.parent.parent))


def _report(run_dir: RunDir) -> None:
    """What the run came to, for a person to open; a run does not fail because of its report."""
    try:
        from instar.logs.reporting.report import write_report

        write_report(run_dir)
    except Exception as error:
        logger.warning("no report: %s: %s", type(error).__name__, error)


def _live(
    loaded: Loaded, log: RankLog, signal: StopSignal, resume: Resume | None, *, only_test: bool
) -> None:
    with (
        ExitStack() as record,  # which outlasts the meeting: who was lost is known when it ends
        join(loaded.config.parallel, loaded.config.device) as world,
        ExitStack() as stack,
    ):
        console = open_console() if world.is_main else silent_console()
        record.enter_context(closing(console))
        world.at("preparing data")
        with together(world, "preparing data"):
            if world.is_main:
                prepare_data(loaded, world.size, console.say)
        resume = resume or _agree_to_resume(loaded, world)
        with together(world, "checking the config"):
            prepared = preflight(loaded, world.size, new=resume is None)
            changed = overridden(resume, prepared.config) if resume else {}
        if SafePoint(world, signal).meet():
            raise Interrupted(NOTHING_STARTED)
        run_dir = resume.run if resume else _agree_on_run_dir(prepared, loaded, world)
        with together(world, "taking the run's folder"):
            if world.is_main:
                record.enter_context(hold(run_dir))
                Inbox(run_dir.control).clear()
                sweep(run_dir.path)
        log.open(run_dir.path)
        logger.info("rank %d of %d on %s", world.rank, world.size, world.device)
        sink = _record(run_dir, prepared.config, console) if world.is_main else Silent()
        record.enter_context(closing(sink))
        record.enter_context(_failures_told(sink, log))
        trainer = build(prepared, world, signal, sink, console, log, run_dir)
        if world.size > 1:
            _kept.append(trainer)
        stack.enter_context(closing(trainer))
        start = go_on(trainer, resume) if resume else None
        event = _started(trainer, prepared, run_dir, start)
        trainer.narrator.opened(event, run_dir.path, only_test=only_test)
        if resume and changed and not only_test:
            with together(world, "writing the config"):
                if world.is_main:
                    _replace_config(run_dir, prepared, loaded, trainer.progress.step)
            trainer.narrator.overridden(trainer.progress, changed)
        if only_test:
            name = start.name if start else "last"
            if final_test(trainer, run_dir.path, weights=name) is None:
                raise Interrupted(f"again: instar test {run_dir.path}")
            return
        if start is not None:
            _name_best(trainer, start, run_dir)
        interrupted = _to_the_end(trainer, run_dir)
    if interrupted:
        raise Interrupted(f"go on with: instar resume {run_dir.path}")


def _record(run_dir: RunDir, config: RunConfig, console: Console) -> Sink:
    """The record, what is copied from it into other tools, and whoever is told of alerts."""
    sink: Sink = Recorder(run_dir.events)
    if trackers := configured(config.record.trackers):
        told = TrackedRun.live(run_dir.path, config.model_dump(mode="json"))
        sink = Mirror(sink, trackers, told, console.warn)
    alerts = config.record.alerts
    notifier = Notifier(run_dir, alerts.argv, alerts.webhook)
    return Watched(sink, Rules(alerts), notifier, console.warn)


@contextmanager
def _failures_told(sink: Sink, log: RankLog) -> Iterator[None]:
    """The record's last word says why a run ended that nobody stopped.

    First of all whoever started the ranks learns it: closing a record may take its time.
    """
    try:
        yield
    except BaseException as error:
        log.write_down(error)
        code = exit_code_of(error)
        if code not in (0, Interrupted.exit_code):
            failure = describe(error, log.rank, log.step)
            rank = error.rank if isinstance(error, PeerError) else log.rank
            with suppress(RecordError):
                sink.write(
                    Failed(message=failure.sentence(), rank=rank, step=log.step, exit_code=code)
                )
        raise


def _name_best(trainer: Trainer, start: Path, run_dir: RunDir) -> None:
    """A run may have died between a save and the pointers that were to name it: they do now."""
    with together(trainer.world, "naming the best checkpoint"):
        if trainer.world.is_main:
            for metric in trainer.best_is_now:
                point(run_dir.path, trainer.judge.pointers[metric], start)


def _to_the_end(trainer: Trainer, run_dir: RunDir) -> bool:
    """Train, save and test; whether somebody stopped it before."""
    try:
        outcome = trainer.train()
        trainer.save(outcome.decision.reason, must=True)
    except BaseException:
        trainer.saver.abandon()
        raise
    decision = outcome.decision
    if trainer.config.test.at_end and not decision.interrupted:
        weights = trainer.config.test.weights
        if final_test(trainer, run_dir.path, weights=weights) is None:
            decision = trainer.safe.decision()
    trainer.safe.answer("stop")
    best = trainer.judgement.best.get(LOSS)
    trainer.narrator.closed(outcome.progress, decision, best, run_dir.path)
    return decision.interrupted


def go_on(trainer: Trainer, resume: Resume) -> Path | None:
    """Take up the checkpoint that rank 0 chooses; None where nothing was saved yet.

    Raises:
        CheckpointError: there is none that is whole, or it is of something else.
    """
    world = trainer.world
    path, warnings = "", list[str]()
    with together(world, "choosing a checkpoint"):
        if world.is_main:
            chosen, skipped = choose(resume)
            path = str(chosen.path) if chosen else ""
            warnings = [f"passed over: {error}" for error in skipped]
    path = str(agree(world, path))
    if path:
        with together(world, "going on from the checkpoint"):
            # rank 0 has just read every byte of it
            checkpoint = load(Path(path), check=False)
            warnings += take_up(trainer, checkpoint, allow=resume.allow)
        with together(world, "looking at what is still to come"):
            check_ahead(trainer)
    again = trainer.supply.to_read_again(trainer.course, trainer.progress.samples)
    if again:
        warnings.append(
            f"the data is a stream, which is read from its beginning: about {again:,} samples are "
            "read again before the first step"
        )
    for warning in warnings:
        trainer.narrator.warn(warning, trainer.progress.step)
    return Path(path) if path else None


def _agree_to_resume(loaded: Loaded, world: World) -> Resume | None:
    """Rank 0 looks whether there is a run to go on with: `resume: auto`, or a restart."""
    found: Resume | None = None
    with together(world, "looking for the run"):
        if world.is_main:
            found = automatic(loaded.config, recall(LAUNCH_KEY))
    folder = agree(world, str(found.run.path) if found else None)
    return Resume(RunDir(Path(str(folder))), fresh=True) if folder is not None else None


def _agree_on_run_dir(prepared: Prepared, loaded: Loaded, world: World) -> RunDir:
    """Rank 0 makes the run's folder and writes the resolved config; all learn where it is."""
    path = ""
    with together(world, "making the run's folder"):
        if world.is_main:
            made = create_run_dir(prepared.config.record, prepared.config.name)
            _write_config(made, prepared, loaded.origins)
            for name, file in prepared.blueprint.kept.items():
                replace_file(made.path / name, file.read_bytes())
            path = str(made.path)
            remember(LAUNCH_KEY, str(made.path.absolute()))
    return RunDir(Path(str(agree(world, path))))


def _write_config(run_dir: RunDir, prepared: Prepared, origins: Mapping[str, str]) -> None:
    origins = {**origins, **dict.fromkeys(prepared.derived, DERIVED)}
    replace_file(run_dir.config, resolved(prepared.config, origins).encode())


def _replace_config(run_dir: RunDir, prepared: Prepared, loaded: Loaded, step: int) -> None:
    """What is set otherwise becomes the run's own config; the one until now stays beside it."""
    text = run_dir.config.read_text("utf-8")
    replace_file(run_dir.path / f"run-until-step-{step}.yaml", text.encode())
    # what the run's own file gives has come from where that file says
    kept = {
        key: origin
        for key, origin in origins_of(lines_of(text)).items()
        if loaded.origins.get(key, "").startswith(f"{run_dir.config}:")
    }
    _write_config(run_dir, prepared, {**loaded.origins, **kept})


def _started(
    trainer: Trainer, prepared: Prepared, run_dir: RunDir, start: Path | None
) -> RunStarted:
    world = trainer.world
    device = str(world.device) if world.device.type == "cpu" else "cuda"
    facts = machine(device)
    name = str(facts.get("gpu", "cpu"))
    how = "DDP" if trainer.config.reproducible == "fixed" else "elastic"
    shape = trainer.in_force.architecture
    return RunStarted(
        run_id=run_dir.id,
        step=trainer.progress.step,
        resumed_from=start.name if start else None,
        model=shape_text(shape),
        parameters=count_parameters(shape).total,
        devices=name if world.size == 1 else f"{world.size}×{name} {how}",
        world_size=world.size,
        unit=prepared.blueprint.unit,
        architecture=dict(trainer.task.describe()),
        versions=versions(),
        machine=facts,
    )
