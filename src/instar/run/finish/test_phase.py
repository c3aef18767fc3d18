"""Final test: evaluates the whole test split on all ranks, with the best weights or the last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
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
from instar.data.columns import Columns, Ragged, leaves
from instar.data.order import Int64Array
from instar.data.split import Subset
from instar.distributed.agree import Json, agree, gather_parts, raise_on_all_ranks
from instar.distributed.world import World
from instar.record.atomic import make_folder, replace_file
from instar.run.loop.components import Components
from instar.run.parallel.choose import build_meta_model, wrap_for_eval
from instar.run.parallel.strategy import Evaluable
from instar.run.start.restore import load_average, load_model_state
from instar.run.state.run_state import RunState
from instar.run.step.evaluate import EvaluationOptions, TestResult, evaluate_source
from instar.run.step.stepper import set_model_step
from instar.schedule.operations import fold_history, history_from_json
from instar.tasks.basis import basis_of
from instar.tasks.task import Task

FOLDER = "test"
RESULT = "result.json"
MAX_CLASSES = 4096
"""of a confusion matrix"""


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
                Predictions.clear(folder)
        numbers = source.numbers if isinstance(source, Subset) else None
        predictions = Predictions(folder, world, numbers) if _is_wanted(state, parts) else None
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
    file = predictions.finish() if predictions else None
    confusions: dict[str, list[list[int]]] = {}
    with raise_on_all_ranks(world, "writing the test's result"):
        if world.is_main:
            confusions = confusion(file) if file else {}
            n_predicted = predictions.samples if predictions else 0
            checksum = file_entry(file, "").xxh3_128 if file else ""
            content = test_result.to_dict(confusions, n_predicted, checksum)
            replace_file(folder / RESULT, encode_json(content))
            if file and n_predicted != result.samples:
                parts.logger.warn(
                    f"{file} has predictions of {n_predicted:,} of {result.samples:,} test samples",
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


def _is_wanted(state: RunState, parts: Components) -> bool:
    """Return whether predictions are configured; warn and return False if pyarrow is missing."""
    if parts.config.test.predictions and find_spec("pyarrow") is None:
        parts.logger.warn(
            "predictions are not written: pyarrow is not installed (pip install 'instar[hf]')",
            state.step,
        )
        return False
    return parts.config.test.predictions


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


FILE = "predictions.parquet"
SAMPLE = "sample"
"""column of the sample's number in the data"""
PREDICTED = ".predicted"
"""suffix of a column of predictions, after the name of the target's column"""


class Predictions:
    """Gathers the predictions of all ranks into one Parquet file. Requires pyarrow."""

    def __init__(self, folder: Path, world: World, numbers: Int64Array | None = None) -> None:
        """
        Args:
            numbers: sample numbers of the split, [samples]; default: positions in the split.
        """
        self._folder, self._world, self._numbers = folder, world, numbers
        self._tables: list[Any] = []
        self.samples = 0
        """number of samples with predictions in the file that `finish` wrote; set on rank 0"""

    @staticmethod
    def clear(folder: Path) -> None:
        """Remove the files of an earlier test."""
        for file in (folder / FILE, *folder.glob(".part-*")):
            file.unlink(missing_ok=True)

    def add(self, places: Int64Array, predictions: Columns) -> None:
        """Add the predictions of samples of this rank.

        Args:
            places: positions of the samples in the split.
        """
        import pyarrow as pa

        numbers = places if self._numbers is None else self._numbers[places]
        columns = {SAMPLE: pa.array(numbers)}
        columns |= {name: _array(name, column) for name, column in leaves(predictions)}
        self._tables.append(pa.table(columns))

    def finish(self) -> Path | None:
        """Write the file on rank 0. A collective.

        The ranks' parts are sent through the process group, because hosts may not share a file
        system.

        Returns:
            the file on rank 0; None on other ranks, and if there are no predictions.
        """
        part = b""
        with raise_on_all_ranks(self._world, "encoding predictions"):
            if self._tables:
                part = _encode(self._tables)
        parts = gather_parts(self._world, part)
        with raise_on_all_ranks(self._world, "writing predictions"):
            if tables := [_decode(table) for table in parts if table]:
                self.samples = len(set().union(*(table[SAMPLE].to_pylist() for table in tables)))
                replace_file(self._folder / FILE, _encode(tables, sort=True))
        return self._folder / FILE if self.samples else None


def _encode(tables: Sequence[Any], *, sort: bool = False) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, sink = pa.concat_tables(tables), pa.BufferOutputStream()
    pq.write_table(table.sort_by(SAMPLE) if sort else table, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _decode(content: bytes) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    return pq.read_table(pa.BufferReader(content))


def confusion(file: Path) -> dict[str, list[list[int]]]:
    """Return the confusion matrix of every classification target: counts by true class (row) and
    predicted class (column). Targets of -1 are ignored.

    Other whole numbers that a custom task predicts (counts, ids) are no classes: without a matrix
    are targets with more than MAX_CLASSES of them, or with negative predictions.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(file)
    matrices = {}
    for name in table.column_names:
        target = name.removesuffix(PREDICTED)
        if target == name or target not in table.column_names:
            continue
        of_target, of_name = _flat(table[target]), _flat(table[name])
        if not pa.types.is_integer(of_name.type):
            continue
        true, predictions = of_target.to_numpy(), of_name.to_numpy()
        has_target = true >= 0
        classes = int(max(true.max(initial=-1), predictions.max(initial=-1))) + 1
        if not 0 < classes <= MAX_CLASSES or predictions.min(initial=0) < 0:
            continue
        matrix = np.zeros((classes, classes), dtype=np.int64)
        np.add.at(matrix, (true[has_target], predictions[has_target]), 1)
        matrices[target] = matrix.tolist()
    return matrices


def _flat(column: Any) -> Any:
    """Flatten a column of node-level predictions; return others unchanged."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = pa.types.is_list(column.type)
    return pc.list_flatten(column) if lists else column


def _array(name: str, column: NDArray[Any] | Ragged) -> Any:
    import pyarrow as pa

    if isinstance(column, Ragged):
        offsets = column.offsets - column.offsets[0]
        return pa.ListArray.from_arrays(offsets.astype(np.int32), _array(name, column.flat))
    if column.ndim == 1:
        return pa.array(column)
    if column.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(column.reshape(-1)), column.shape[1])
    raise ValueError(
        f"{name}: a prediction is a number or a list of numbers, not {column.shape[1:]}"
    )
