"""Final test: evaluates the whole test split on all ranks, with the best weights or the last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import msgspec
from torch.nn import Module

from instar.checkpoint.listing import BEST, latest_checkpoint, pointer_target
from instar.checkpoint.manifest import (
    CheckpointError,
    CheckpointId,
    encode_json,
    file_entry,
    identify,
    read_json,
)
from instar.checkpoint.store import LATEST, Checkpoint, load_checkpoint
from instar.data.sample_set import Subset
from instar.distributed.agree import Json, agree, raise_on_all_ranks
from instar.record.atomic import make_folder, replace_file
from instar.run.components import Components
from instar.run.parallel.choose import build_meta_model, wrap_for_eval
from instar.run.parallel.strategy import Evaluable
from instar.run.start.restore import load_average, load_model_state
from instar.run.state.run_state import RunState
from instar.run.step.evaluate import EvaluationOptions, TestResult, evaluate_source
from instar.run.step.stepper import set_model_step
from instar.schedule.operations import fold_history, history_from_json
from instar.tasks.basis_of import basis_of
from instar.tasks.task import Task

FOLDER = "test"
RESULT = "result.json"
FILE = "predictions.parquet"


def run_final_test(
    state: RunState, parts: Components, run: Path, *, weights: str
) -> TestResult | None:
    """Test, and write `test/result.json` and the task's predictions. A collective.

    Args:
        weights: best, last, or the name of the checkpoint that has the current weights.

    Returns:
        the result, or None if a stop was requested meanwhile.

    Raises:
        RunFailed: a rank could not read its samples.
        CheckpointError: the best checkpoint cannot be read.
    """
    world, folder = parts.world, run / FOLDER
    parts.sync.begin("the final test", state.step)
    with _weights(state, parts, run, weights) as (task, model, step, checkpoint, name, collective):
        source = task.held_out("test")
        basis = basis_of(parts.config, task, source)
        with raise_on_all_ranks(world, "making the test's folder"):
            if world.is_main:
                make_folder(folder)
                # a result never lies beside the predictions of other weights
                (folder / RESULT).unlink(missing_ok=True)
                for file in (folder / FILE, *folder.glob(".part-*")):
                    file.unlink(missing_ok=True)
        numbers = source.numbers if isinstance(source, Subset) else None
        predictions = None
        if _keeps_predictions(state, parts):
            from instar.run.output.predictions import Predictions

            predictions = Predictions(folder / FILE, world, numbers)
        options = EvaluationOptions(
            parts.config.eval.batch_size or state.settings.batch_size,
            parts.config.seed,
            autocast=parts.stepper.autocast,
            forward_is_collective=collective,
        )
        on_predictions = predictions.add if predictions else None
        result = evaluate_source(task, model, source, options, parts.sync, on_predictions)
    if result is None:
        return None
    test_result = TestResult(step, name, result, checkpoint, basis)
    written = predictions.finish() if predictions else None
    confusions: dict[str, list[list[int]]] = {}
    with raise_on_all_ranks(world, "writing the test's result"):
        if world.is_main:
            confusions = predictions.confusion() if predictions and written else {}
            n_predicted = predictions.samples if predictions else 0
            checksum = file_entry(written, "").xxh3_128 if written else ""
            content = test_result.to_dict(confusions, n_predicted, checksum)
            replace_file(folder / RESULT, encode_json(content))
            if written and n_predicted != result.samples:
                parts.logger.warn(
                    f"{written} has predictions of {n_predicted:,} of {result.samples:,} test samples",
                    state.step,
                )
    parts.logger.log_test(state.progress, test_result, confusions, folder)
    return test_result


def is_tested(parts: Components, run: Path) -> bool:
    """Return whether the final test's result is that of the weights and samples that it would test now."""
    best = pointer_target(run, BEST) if parts.config.test.weights == "best" else None
    checkpoint = best or pointer_target(run, LATEST)
    if checkpoint is None:
        return False
    try:
        task = _task_at(parts, load_checkpoint(checkpoint, check=False))
        result = read_json(run / FOLDER / RESULT)
        identity = identify(checkpoint)
    except CheckpointError:
        return False
    now = {
        "checkpoint": msgspec.to_builtins(identity),
        "basis": dict(basis_of(parts.config, task, task.held_out("test"))),
    }
    return all(result.get(key) == value for key, value in now.items())


def _keeps_predictions(state: RunState, parts: Components) -> bool:
    """Return whether predictions are configured, and can be written; warn if pyarrow is missing."""
    if not parts.config.test.predictions:
        return False
    if find_spec("pyarrow") is None:
        parts.logger.warn(
            "predictions are not written: pyarrow is not installed (pip install 'instar[hf]')",
            state.step,
        )
        return False
    return True


@contextmanager
def _weights(
    state: RunState, parts: Components, run: Path, weights: str
) -> Iterator[tuple[Task, Module, int, CheckpointId, str, bool]]:
    """Context manager: yield task, model, step, checkpoint and name of the weights to test, and
    whether forward passes are collectives. A collective.

    These are the best checkpoint's if `weights` is best and there is one; else the current weights,
    or their moving average if there is one.
    """
    chosen_json: Json = None
    with raise_on_all_ranks(parts.world, "choosing the weights to test"):
        if parts.world.is_main:
            best = pointer_target(run, BEST) if weights == "best" else None
            last = (
                latest_checkpoint(run)
                if weights in ("best", "last")
                else run / "checkpoints" / weights
            )
            path = best or last
            identity = identify(path)
            if best is not None:
                load_checkpoint(best)  # reads every byte
            chosen_json = [best is not None, identity.name, identity.manifest]
    is_best, *id_parts = cast("tuple[bool, str, str]", agree(parts.world, chosen_json))
    identity = CheckpointId(*id_parts)
    if is_best:
        with raise_on_all_ranks(parts.world, "reading the best checkpoint"):
            checkpoint = load_checkpoint(run / "checkpoints" / identity.name, check=False)
            task, strategy = _rebuilt(parts, checkpoint)
        set_model_step(strategy.bare, checkpoint.manifest.step)
        with strategy.evaluating(None):
            step = checkpoint.manifest.step
            yield task, strategy.bare, step, identity, "best", strategy.forward_is_collective
        return
    if weights == "best":
        metric = parts.config.checkpoint.best_of[0]
        text = f"there is no best checkpoint by {metric}: the last weights take its place"
        parts.logger.warn(text, state.step)
    set_model_step(parts.stepper.unwrapped_model, state.step)
    parts.stepper.share_buffers()
    with parts.stepper.evaluating():
        name = "last" if weights == "best" else weights
        collective = parts.stepper.strategy.forward_is_collective
        yield parts.task, parts.stepper.unwrapped_model, state.step, identity, name, collective


def _task_at(parts: Components, checkpoint: Checkpoint) -> Task:
    """Return the task in the shape of a checkpoint."""
    state = fold_history(parts.initial, history_from_json(checkpoint.manifest.history))
    return parts.task.at(state.architecture, state.settings.context)


def _rebuilt(parts: Components, checkpoint: Checkpoint) -> tuple[Task, Evaluable]:
    """Rebuild task and model of a checkpoint, in the shape that it had."""
    task = _task_at(parts, checkpoint)
    strategy = wrap_for_eval(
        parts.config, parts.world, build_meta_model(parts.config, parts.world, task)
    )
    load_model_state(strategy.bare, checkpoint)
    if "ema" in checkpoint.components:
        # the average is used with the buffers of the weights, as in evaluations during training
        load_average(strategy.parameters, checkpoint)
    return task, strategy
