"""One rank's life: join the others, agree on the run, build it, train, save, leave."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from pathlib import Path

from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.store import Checkpoint, latest, load, publish, replace_file
from instar.config.dump import resolved
from instar.config.load import Loaded
from instar.data.tokenizer import TOKENIZER_FILE
from instar.distributed.agree import agree, together
from instar.distributed.failure import Interrupted
from instar.distributed.ranklog import RankLog
from instar.distributed.signals import StopSignal
from instar.distributed.world import World, join
from instar.models.architecture import count_parameters
from instar.record.console import open_console, silent_console
from instar.record.events import RunStarted
from instar.record.recorder import Recorder, Silent
from instar.record.rundir import RunDir, create_run_dir
from instar.record.system import machine, versions
from instar.run.build import build
from instar.run.preflight import Prepared, preflight, prepare_data
from instar.run.safepoint import SafePoint
from instar.run.state import (
    copy_tensors,
    history_from_json,
    history_to_json,
    load_optimizer_tensors,
    optimizer_tensors,
)
from instar.run.trainer import Outcome, Trainer

logger = logging.getLogger(__name__)


def run(loaded: Loaded, log: RankLog, signal: StopSignal, resumed: Path | None = None) -> None:
    """Train as one rank of the world that the environment describes.

    Args:
        resumed: the folder of a run that goes on from its latest checkpoint; None: a new run.

    Raises:
        ConfigError: the run cannot start; nothing was made.
        CheckpointError: there is nothing whole to go on from.
        RunFailed: it started and cannot go on.
        Interrupted: a signal asked it to stop, and all ranks did, at the same step.
    """
    with join(loaded.config.distributed, loaded.config.device) as world:
        console = open_console() if world.is_main else silent_console()
        with closing(console):
            with together(world, "preparing data"):
                if world.is_main:
                    prepare_data(loaded, console.say)
            with together(world, "checking the config"):
                prepared = preflight(loaded, world.size, new=resumed is None)
            if SafePoint(world, signal).meet():
                raise Interrupted(
                    "stopped before the first step; start again with the same command"
                )
            run_dir = RunDir(resumed) if resumed else _agree_on_run_dir(prepared, loaded, world)
            log.open(run_dir.path)
            logger.info("rank %d of %d on %s", world.rank, world.size, world.device)
            with closing(Recorder(run_dir.events) if world.is_main else Silent()) as sink:
                trainer = build(prepared, world, signal, sink, console, log)
                with closing(trainer.feed):
                    if resumed:
                        with together(world, "going on from the checkpoint"):
                            go_on(trainer, prepared, load(latest(resumed)))
                    event = _started(prepared, run_dir, world, trainer.progress.step)
                    trainer.narrator.opened(event, run_dir.path)
                    outcome = trainer.train()
                    _save(trainer, prepared, outcome, run_dir, world)
                    trainer.narrator.closed(outcome.progress, outcome.decision, run_dir.path)
    if outcome.decision.interrupted:
        raise Interrupted(f"go on with: instar resume {run_dir.path}")


def go_on(trainer: Trainer, prepared: Prepared, checkpoint: Checkpoint) -> None:
    """Give a new trainer everything a checkpoint holds, so that no later step can tell.

    Raises:
        CheckpointError: it is of another model or of other data.
    """
    if checkpoint.manifest.architecture != prepared.architecture.to_dict():
        raise CheckpointError(f"{checkpoint.path}: of another architecture than the config's")
    if checkpoint.state["data"] != prepared.dataset.fingerprint:
        raise CheckpointError(
            f"{checkpoint.path}: trained on other data than {prepared.dataset.path} holds now"
        )
    stepper = trainer.stepper
    copy_tensors(stepper.parameters, checkpoint.tensors("model"))
    load_optimizer_tensors(stepper.optimizers, stepper.parameters, checkpoint.tensors("optimizer"))
    if stepper.ema is not None:
        kept = "ema" if "ema" in checkpoint.components else "model"
        copy_tensors(stepper.ema, checkpoint.tensors(kept))
    trainer.restore(checkpoint.state, history_from_json(checkpoint.manifest.history))


def _agree_on_run_dir(prepared: Prepared, loaded: Loaded, world: World) -> RunDir:
    """Rank 0 makes the run's folder and writes the resolved config; all learn where it is."""
    path = ""
    with together(world, "making the run's folder"):
        if world.is_main:
            made = create_run_dir(prepared.config.record, prepared.config.name)
            origins = {**loaded.origins, **dict.fromkeys(prepared.derived, "derived")}
            replace_file(made.config, resolved(prepared.config, origins).encode())
            # a run's own copy, so that a checkpoint can speak without the data
            tokenizer = (prepared.dataset.path / TOKENIZER_FILE).read_bytes()
            replace_file(made.path / TOKENIZER_FILE, tokenizer)
            path = str(made.path)
    return RunDir(Path(str(agree(world, path))))


def _started(prepared: Prepared, run_dir: RunDir, world: World, step: int) -> RunStarted:
    device = str(world.device) if world.device.type == "cpu" else "cuda"
    facts = machine(device)
    name = str(facts.get("gpu", "cpu"))
    shape = prepared.architecture
    return RunStarted(
        run_id=run_dir.id,
        step=step,
        model=f"{shape.n_layer}L/{shape.n_embd}d",
        parameters=count_parameters(shape).total,
        devices=name if world.size == 1 else f"{world.size}×{name} DDP",
        world_size=world.size,
        architecture=shape.to_dict(),
        versions=versions(),
        machine=facts,
    )


def _save(
    trainer: Trainer, prepared: Prepared, outcome: Outcome, run_dir: RunDir, world: World
) -> None:
    """Rank 0 publishes what all ranks hold alike."""
    begun = time.perf_counter()
    stepper, progress = trainer.stepper, outcome.progress
    with together(world, "saving"):
        if not world.is_main:
            return
        components = {
            "model": {name: p.detach() for name, p in stepper.parameters.items()},
            "optimizer": optimizer_tensors(stepper.optimizers, stepper.parameters),
        }
        if stepper.ema is not None:
            components["ema"] = stepper.ema
        path = publish(
            run_dir.path,
            progress.step,
            components,
            {**trainer.state(), "data": prepared.dataset.fingerprint},
            architecture=trainer.task.describe(),
            history=history_to_json(trainer.history),
        )
        size = sum(file.stat().st_size for file in path.iterdir())
        trainer.narrator.saved(progress, path, time.perf_counter() - begun, size)
