"""What is said of a final test whose weights or predictions are not those that lie beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from instar.checkpoint.manifest import (
    Facts,
    file_entry,
    identify,
    line_of_start,
    read_manifest,
    write_line,
)
from instar.checkpoint.store import CheckpointContent, publish_checkpoint
from instar.extensions.board.ending import read_final_test
from instar.record.rundir import RunDir


def save(root: Path, value: float) -> Path:
    tensors = {"model": {"weight": torch.full((2,), value)}}
    return publish_checkpoint(
        root, 8, CheckpointContent(tensors, {}, {}, facts=Facts(line=line_of_start(None)))
    )


def predict(root: Path, last: float = 1.0) -> Path:
    values = np.linspace(0, last, 5)
    path = root / "test" / "predictions.parquet"
    pq.write_table(pa.table({"size": values, "size.predicted": values}), path)
    return path


@pytest.fixture
def tested_run(tmp_path: Path) -> RunDir:
    """A run of one checkpoint, which is tested."""
    run, path = RunDir(tmp_path), save(tmp_path, 1.0)
    write_line(tmp_path, read_manifest(path).line)
    (tmp_path / "test").mkdir()
    result: dict[str, Any] = {"step": 8, "weights": "last", "samples": 5}
    result["metrics"] = {"loss": {"value": 1.0}}
    result["checkpoint"] = msgspec.to_builtins(identify(path))
    result["predictions_xxh3_128"] = file_entry(predict(tmp_path), "").xxh3_128
    (tmp_path / "test" / "result.json").write_text(json.dumps(result))
    return run


def notes(run: RunDir) -> tuple[str, ...]:
    final_test = read_final_test(run)
    assert final_test is not None
    return final_test.notes


def test_nothing_is_said_of_a_test_of_what_is_there(tested_run: RunDir) -> None:
    assert notes(tested_run) == ()
    final_test = read_final_test(tested_run)
    assert final_test is not None
    assert len(final_test.scatters) == 1


def test_a_test_of_weights_that_are_gone_or_others_now_is_said_to_be_one(
    tested_run: RunDir,
) -> None:
    shutil.rmtree(tested_run.checkpoints / "step-8")
    assert notes(tested_run) == ("step-8, of which the test is, is no longer on disk.",)
    save(tested_run.path, 2.0)
    (note,) = notes(tested_run)
    assert note == "The test is of an earlier step-8; another checkpoint has that name now."


def test_a_test_of_a_branch_that_was_left_is_said_to_be_one(tested_run: RunDir) -> None:
    write_line(tested_run.path, line_of_start(None))
    assert "a branch that the run left at step 0" in notes(tested_run)[0]


def test_predictions_of_other_weights_are_not_shown(tested_run: RunDir) -> None:
    predict(tested_run.path, 2.0)
    final_test = read_final_test(tested_run)
    assert final_test is not None
    assert final_test.scatters == ()
    assert final_test.notes == ("test/predictions.parquet is not of the test of test/result.json.",)
