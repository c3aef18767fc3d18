"""Commands that only look read no file outside a run's folder through a link that was planted in it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from needed import without_deleted
from tiny_run import TEXT

from instar.cli.main import main
from instar.extensions import built_in

LOOKING = without_deleted(
    [
        "logs list runs",
        "logs summary {run}",
        "logs compare {run} {run}",
        "logs events {run}",
        "logs tail {run}",
        "logs tail {run} --rank 0",
        "logs plot {run} -o plot.html --format html",
        "report {run} -o report.html",
        "control {run} status",
        "config show {run}/run.yaml",
        "checkpoint list {run}",
        "checkpoint inspect {run}",
        "checkpoint verify {run}",
        "checkpoint analyze {run}",
        "delta log {run}",
        "sample {run} --tokens 2",
    ]
)
CONFIG = """\
model: {n_layer: 1, n_head: 2, n_embd: 16, context: 16}
data: {source: squares.txt, path: tokens, tokenizer: char}
train: {until: 4it, batch_size: 4}
eval: {eval_interval: 2}
checkpoint: {every_steps: 2}
record: {sample_tokens: 0, report: false, run_dir: runs/theirs}
"""
_open_paths: list[str] | None = None


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if _open_paths is not None and event == "open" and isinstance(arguments[0], str | bytes | Path):
        _open_paths.append(os.path.realpath(os.fsdecode(arguments[0])))


@contextmanager
def watch_opens() -> Iterator[list[str]]:
    """What this process opens, where it really is. A hook of `sys` cannot be removed."""
    global _open_paths
    _open_paths = []
    try:
        yield _open_paths
    finally:
        _open_paths = None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that a run keeps, in `runs`, and `outside` beside it."""
    place = tmp_path_factory.mktemp("planted")
    (place / "squares.txt").write_text(TEXT)
    deltas = ", delta: {every: 1}" if "delta" in built_in() else ""
    (place / "tiny.yaml").write_text(CONFIG.replace("every_steps: 2", f"every_steps: 2{deltas}"))
    (place / "outside").mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(place)
        assert main(["train", "tiny.yaml"]) == 0
        assert main(["test", "runs/theirs"]) == 0
        for command in LOOKING:
            assert main(shlex.split(command.format(run="runs/theirs"))) == 0, command
    sys.addaudithook(_note)
    return place / "runs" / "theirs"


@pytest.mark.parametrize(
    "name",
    ["checkpoints", "checkpoints/step-4", "logs", "test", *["deltas"] * ("delta" in built_in())],
)
def test_nothing_is_read_through_a_link_that_was_planted_in_a_run(
    run: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent.parent)
    folder, outside = run / name, run.parent.parent / "outside" / name
    outside.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(outside)
    try:
        for command in LOOKING:
            folder.symlink_to(outside)
            with watch_opens() as paths:
                code = main(shlex.split(command.format(run="runs/theirs")))
            folder.unlink()
            assert code in (0, 2, 3, 4), command
            through = [path for path in paths if path.startswith(str(outside.parent))]
            assert not [path for path in through if not Path(path).is_dir()], command
    finally:
        folder.unlink(missing_ok=True)
        outside.rename(folder)


def test_a_run_whose_own_folder_is_a_link_is_looked_at(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks has named the link."""
    monkeypatch.chdir(run.parent.parent)
    (tmp_path / "test").symlink_to(run)
    for command in ("logs summary {run}", "checkpoint verify {run}", "logs tail {run} --rank 0"):
        assert main(shlex.split(command.format(run=tmp_path / "test"))) == 0
