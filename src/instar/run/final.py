"""The final test: the whole test split, once, over all ranks, by the best weights or the last."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from instar.checkpoint.disk import make_folder, replace_file
from instar.checkpoint.manifest import encode_json
from instar.checkpoint.store import BEST, Checkpoint, load, pointed_at
from instar.data.division import Subset
from instar.distributed.agree import agree, together
from instar.run.evaluate import Evaluation, evaluate
from instar.run.predictions import Predictions, confusion
from instar.run.state import copy_tensors, history_from_json
from instar.run.step import enter
from instar.schedule.operations import fold
from instar.tasks.task import Task

if TYPE_CHECKING:
    from instar.run.trainer import Trainer

FOLDER = "test"
RESULT = "result.json"


@dataclass(frozen=True)
class Tested:
    """What came out of a test, and whose weights they were."""

    step: int
    weights: str
    """best, last, or the name of a checkpoint"""
    evaluation: Evaluation

    def to_dict(self, confusions: Mapping[str, Any]) -> dict[str, Any]:
        metrics = {n: dataclasses.asdict(m) for n, m in self.evaluation.metrics.items()}
        return {
            "step": self.step,
            "weights": self.weights,
            "samples": self.evaluation.samples,
            "seconds": self.evaluation.seconds,
            "metrics": metrics,
            "confusion": dict(confusions),
        }


def final_test(trainer: Trainer, run: Path, *, weights: str) -> Tested | None:
    """Test, and write `test/result.json` and what the task predicted of each sample.

    All ranks come here together. `weights`: best, last, or what the present ones are called.

    Returns:
        the result, or None when a stop was requested meanwhile.

    Raises:
        RunFailed: a rank could not read its samples.
        CheckpointError: the best checkpoint cannot be read.
    """
    world, folder = trainer.world, run / FOLDER
    trainer.safe.enter("the final test", trainer.progress.step)
    with _weights(trainer, run, weights) as (task, model, step, whose):
        source = task.held_out("test")
        with together(world, "making the test's folder"):
            if world.is_main:
                make_folder(folder)
                Predictions.clear(folder)
        numbers = source.numbers if isinstance(source, Subset) else None
        written = Predictions(folder, world, numbers) if _wanted(trainer) else None
        result = evaluate(
            task,
            model,
            source,
            world,
            batch_size=trainer.config.eval.batch_size or trainer.settings.batch_size,
            limit=None,
            seed=trainer.config.seed,
            autocast=trainer.stepper.autocast,
            safe=trainer.safe,
            see=written.see if written else None,
        )
    if result is None:
        return None
    tested = Tested(step, whose, result)
    file = written.finish() if written else None
    confusions: dict[str, list[list[int]]] = {}
    with together(world, "writing the test's result"):
        if world.is_main:
            confusions = confusion(file) if file else {}
            replace_file(folder / RESULT, encode_json(tested.to_dict(confusions)))
    trainer.narrator.tested(trainer.progress, tested, confusions, folder)
    return tested


def _wanted(trainer: Trainer) -> bool:
    """Whether predictions are to be written, and can be."""
    if trainer.config.test.predictions and find_spec("pyarrow") is None:
        trainer.narrator.warn(
            "predictions are not written: pyarrow is not installed (pip install 'instar[hf]')",
            trainer.progress.step,
        )
        return False
    return trainer.config.test.predictions


@contextmanager
def _weights(trainer: Trainer, run: Path, weights: str) -> Iterator[tuple[Task, Module, int, str]]:
    """Task and model of the best checkpoint, where it is to be that and there is one; or as they
    are, averaged where an average is kept."""
    path = ""
    with together(trainer.world, "choosing the weights to test"):
        if trainer.world.is_main and weights == "best":
            best = pointed_at(run, BEST)
            path = str(load(best).path) if best is not None else ""
    path = str(agree(trainer.world, path))
    if path:
        with together(trainer.world, "reading the best checkpoint"):
            # rank 0 has just read every byte of it
            checkpoint = load(Path(path), check=False)
            task, model = _revived(trainer, checkpoint)
        enter(model, checkpoint.manifest.step)
        yield task, model, checkpoint.manifest.step, "best"
        return
    enter(trainer.stepper.bare_model, trainer.progress.step)
    with trainer.stepper.averaged_weights():
        name = "last" if weights == "best" else weights
        yield trainer.task, trainer.stepper.bare_model, trainer.progress.step, name


def _revived(trainer: Trainer, checkpoint: Checkpoint) -> tuple[Task, Module]:
    """The model as it was, in the shape that it had then."""
    history = history_from_json(checkpoint.manifest.history)
    state = fold(trainer.config, trainer.initial.architecture, history)
    task = trainer.task.at(state.architecture, state.settings.context)
    model = task.shell().to(trainer.world.device)
    kept = "ema" if "ema" in checkpoint.components else "model"
    copy_tensors(dict(model.named_parameters()), checkpoint.tensors(kept))
    return task, model
