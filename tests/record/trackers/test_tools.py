"""Every tracker for real, without a network: what was written is read back by the tool itself."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from cases import parametrize_first
from figures import times
from tracked import INFINITE_STEP, NAN_STEP, TOOLS, loss, process, read_back, read_when, write_run

STEPS = times(2_500, 10_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "demo-ab3cd"
    run.mkdir()
    return run


def curve(found: dict[str, Any]) -> dict[int, float]:
    return dict(found["points"])


@pytest.mark.repeated
@parametrize_first("tool", TOOLS, first=2)
def test_a_whole_run_is_read_back(folder: Path, tool: str) -> None:
    write_run(tool, folder, 0, STEPS)
    found = read_back(tool, folder)
    assert [step for step, _ in found["points"]] == list(range(1, STEPS + 1))
    values = curve(found)
    assert math.isnan(values.pop(NAN_STEP))
    assert values.pop(INFINITE_STEP) == math.inf
    assert values == pytest.approx({step: loss(step) for step in values}, rel=1e-6)
    assert found["tokens"][-1] == [STEPS, 64 * STEPS]
    told = json.dumps(found["config"])
    assert "model.n_layer" in told
    assert "9it" in told
    assert "secret" not in told
    assert "64→128" in found["notes"]["operation"][0][1]
    assert "it rises" in found["notes"]["alert"][0][1]
    assert "best_loss" in json.dumps(found["final"])


@parametrize_first("tool", TOOLS, first=1)
def test_what_a_killed_run_had_written_is_there_and_it_goes_on_as_the_same_run(
    folder: Path, tool: str
) -> None:
    with process("write", tool, folder, 0, 200, "wait") as writer:
        before = read_when(tool, folder, 200)
        writer.kill()
    assert len(before["points"]) == 200
    assert read_back(tool, folder)["points"][-1][0] == 200
    write_run(tool, folder, 150, 250)
    after = read_back(tool, folder)
    assert after["runs"] == 1
    assert set(curve(after)) == set(range(1, 251))
    steps = [step for step, _ in after["points"]]
    if tool == "tensorboard":  # which drops what a session start supersedes
        assert steps == list(range(1, 251))
    else:
        assert steps == [*range(1, 201), *range(151, 251)]


@pytest.mark.torture
def test_runs_that_start_together_share_a_new_folder_of_mlflow(tmp_path: Path) -> None:
    """As the runs of a fleet do; MLflow itself creates its folder and experiments unlocked."""
    folders = [tmp_path / f"demo-{number}" for number in range(4)]
    for each in folders:
        each.mkdir()
    writers = [process("write", "mlflow", each, 0, 5) for each in folders]
    assert [each.communicate(timeout=120) for each in writers] == [("", "")] * len(writers)
    assert read_back("mlflow", folders[0], "count") == len(folders)


MEDIA = {
    "tensorboard": ["val/a/__", "| a | b |", "| --- | --- |", "| x\\|y | 1.5 |", "| None | 2 |"],
    "wandb": ["val/a/__ image-file", "val/worst table-file"],
}


@parametrize_first("tool", ["tensorboard", "wandb", "mlflow"], first=1)
def test_images_and_tables_are_read_back(folder: Path, tool: str) -> None:
    write_run(tool, folder, command="write-media")
    found = read_back(tool, folder, "read-media")
    if tool == "mlflow":
        (image,) = (folder / "media").iterdir()
        assert found == [f"val/a/__/{image.name}", "val/worst/000000007.json"]
    else:
        assert found == MEDIA[tool]


def test_wandb_neither_watches_the_machine_nor_keeps_code_or_output(folder: Path) -> None:
    write_run("wandb", folder, 0, 20)
    assert not {"stats", "output", "output_raw", "files"} & set(read_back("wandb", folder)["kinds"])
    kept = [path for path in folder.glob("wandb/offline-run-*/files/**/*") if path.is_file()]
    assert kept == []


def test_trackers_import_neither_torch_nor_tensorflow(folder: Path) -> None:
    code = (
        "import sys; from tracked import *; from pathlib import Path;"
        "write('tensorboard', Path(sys.argv[1]), 0, 5);"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    import subprocess
    import sys

    support = Path(__file__).parents[2] / "support"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, cwd=support)
