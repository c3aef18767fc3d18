"""docs/notebooks.md in a real kernel: cell by cell, with pictures, ranks, an interrupt and a restart."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/notebooks.md"
TASK = "class Spirals(CustomTask)"
LIMIT_S = 180


class Kernel(NotebookClient):  # type: ignore[misc]
    """Runs cells, and counts how often a display is drawn again."""

    n_redrawn = 0

    def process_message(self, msg: Mapping[str, Any], cell: Any, cell_index: int) -> Any:
        self.n_redrawn += msg["msg_type"] == "update_display_data"
        return super().process_message(msg, cell, cell_index)


def kernel(cells: Sequence[str], place: Path, *, may_fail: bool = False) -> Kernel:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    return Kernel(
        notebook,
        timeout=LIMIT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(place)}},
        allow_errors=may_fail,
    )


def run(cells: Sequence[str], place: Path, *, may_fail: bool = False) -> Kernel:
    client = kernel(cells, place, may_fail=may_fail)
    # a kernel that is tested leaves what other processes write to the terminal
    under_test = os.environ.pop("PYTEST_CURRENT_TEST")
    try:
        client.execute()
    finally:
        os.environ["PYTEST_CURRENT_TEST"] = under_test
    return client


def output_of(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def pictures(cell: Any) -> list[Any]:
    return [out for out in cell.outputs if "image/png" in getattr(out, "data", ())]


def error_of(cell: Any) -> str:
    (error,) = [output for output in cell.outputs if output.output_type == "error"]
    return f"{error.ename}: {error.evalue}"


@pytest.fixture(autouse=True)
def _own_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    # as in an environment that is activated: `!instar` of a cell is a command of the shell
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)


def cells_of_page() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_the_page_runs_and_shows_pictures(tmp_path: Path) -> None:
    client = run(cells_of_page(), tmp_path)
    cells = client.nb.cells
    picture_counts = [len(pictures(cell)) for cell in cells]
    # three trainings, a plot, ranks, and the last cell's training and plot
    assert picture_counts == [1, 2, 1, 1, 2, 0]
    # drawing takes a share of the time: a busy machine draws seldom
    assert client.n_redrawn >= 1, "curves are drawn before a run ends, and again"
    assert "torch.Size([1, 3])" in output_of(cells[4])
    assert "2×cpu DDP" in output_of(cells[3])
    assert "from step 200" in output_of(cells[4])
    (config,) = [out.data["text/plain"] for out in cells[3].outputs if "execution_count" in out]
    assert config == "{}", "both runs have one config"


@pytest.mark.torture
def test_ranks_train_what_the_cell_defines_now(tmp_path: Path) -> None:
    task = next(text for text in cells_of_page() if TASK in text).partition("alone =")[0]
    new_task = task.replace('"label": label', '"label": 0 * label')
    assert new_task != task
    start = "run = instar.launch(spirals, world_size=2, curves=False)\n"
    start += "print('final', instar.load_run(run).metric('val/accuracy').value[-1])"
    client = run(["import instar", task, start, new_task, start], tmp_path)
    first, second = (output_of(client.nb.cells[number]) for number in (2, 4))
    accuracies = [
        float(re.findall(r"^final (\S+)$", text, re.MULTILINE)[0]) for text in (first, second)
    ]
    assert accuracies[0] < 1.0
    assert accuracies[1] == 1.0
    assert not list(tmp_path.glob("**/*.pickle"))


def test_code_of_a_cell_fails_with_its_lines(tmp_path: Path) -> None:
    task = next(text for text in cells_of_page() if TASK in text).partition("alone =")[0]
    broken = task.replace(
        "logits = model(batch",
        "assert model.training is None, 'a fault of the cell'\n        logits = model(batch",
    )
    start = "instar.launch({**spirals, 'data': {'val': 0.2, 'workers': 1}}, world_size=2)"
    client = run(["import instar", broken, start], tmp_path, may_fail=True)
    text = error_of(client.nb.cells[2]) + output_of(client.nb.cells[2])
    assert "a fault of the cell" in text
    assert re.search(r"ipykernel_\d+/\d+\.py:\d+ in loss", text)


@pytest.mark.torture
def test_after_a_restart_the_class_is_asked_for(tmp_path: Path) -> None:
    task = next(text for text in cells_of_page() if TASK in text).partition("alone =")[0]
    short = "instar.train(spirals, {'train.until': '20it'}, curves=False)"
    run(["import instar", task, short], tmp_path)
    load = "import instar\nprint(instar.load_model('latest'))"
    resume = "instar.resume('latest', {'train.until': '30it'})"
    (tmp_path / "elsewhere.py").write_text(task, encoding="utf-8")
    resume_elsewhere = f"{resume[:-2]}, 'task': 'elsewhere:Spirals'}})"
    cells = [load, resume, "!instar resume latest", task, load, resume_elsewhere]
    outputs = run(cells, tmp_path, may_fail=True).nb.cells
    for cell in outputs[:2]:
        assert "Spirals was defined in a notebook or a script" in error_of(cell)
    assert "set task=module:Spirals" in output_of(outputs[2])
    assert "Linear(in_features=2, out_features=32" in output_of(outputs[4])
    assert "done  30 steps" in output_of(outputs[5])


def test_an_interrupt_stops_after_a_step_and_curves_stay(tmp_path: Path) -> None:
    train = cells_of_page()[0].replace("60it", "1000000it")
    client = kernel(
        [train, "print(instar.resume(instar.load_run(), {'train.until': '1it'}))"],
        tmp_path,
        may_fail=True,
    )

    def interrupt() -> None:
        deadline = time.monotonic() + LIMIT_S
        while not list(tmp_path.glob("runs/*/events.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(3)
        os.kill(client.km.provisioner.pid, signal.SIGINT)

    with client.setup_kernel():
        threading.Thread(target=interrupt).start()
        client.execute_cell(client.nb.cells[0], 0)
    cell = client.nb.cells[0]
    assert error_of(cell).startswith("Interrupted: ")
    assert "instar resume" in error_of(cell)
    assert len(pictures(cell)) == 1
