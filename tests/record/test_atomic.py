"""What is written aside, while another process sweeps the same folder."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from instar.record import atomic
from instar.record.atomic import atomic_dir, scratch_folder

WRITER = """
import sys
from contextlib import suppress
from pathlib import Path
from instar.record.atomic import atomic_dir
with atomic_dir(Path(sys.argv[1])) as aside:
    (aside / "part").write_text("half")
    print(aside, flush=True)
    sys.stdin.read()
"""


def test_a_folder_that_is_being_made_is_not_swept(tmp_path: Path) -> None:
    """A run that starts in a folder sweeps it; a model may just be imported or exported there."""
    with atomic_dir(tmp_path / "new") as temporary:
        (temporary / "part").write_text("whole")
        atomic.sweep(tmp_path)
        assert (temporary / "part").exists()
    assert (tmp_path / "new/part").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_another_process_is_heard_while_it_writes_and_swept_after_its_death(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "new")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        temporary = Path(writer.stdout.readline().strip())
        atomic.sweep(tmp_path)
        assert (temporary / "part").exists()
        writer.send_signal(signal.SIGKILL)
    atomic.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_being_replaced_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = atomic.write_synced

    def write_and_sweep(path: Path, content: bytes) -> None:
        atomic.sweep(tmp_path)
        write(path, content)
        atomic.sweep(tmp_path)

    monkeypatch.setattr(atomic, "write_synced", write_and_sweep)
    atomic.replace_file(tmp_path / "report.html", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_what_is_swept_before_it_is_held_is_made_again(tmp_path: Path) -> None:
    calls = []

    def make() -> None:
        atomic.make_folder(tmp_path / ".tmp-x")
        calls.append(1)
        if len(calls) == 1:
            atomic.sweep(tmp_path)

    with atomic.holding(make, tmp_path / ".tmp-x"):
        atomic.sweep(tmp_path)
        assert (tmp_path / ".tmp-x").is_dir()
    assert len(calls) == 2


def test_links_and_pipes_are_swept_without_being_followed(tmp_path: Path) -> None:
    target = tmp_path / "kept"
    target.write_text("")
    (tmp_path / ".tmp-link").symlink_to(target)
    os.mkfifo(tmp_path / ".tmp-pipe")
    atomic.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_file_is_replaced_only_when_its_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("old")
    with suppress(ZeroDivisionError), atomic.atomic_file(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    with atomic.atomic_file(path, durable=False) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_published_elsewhere() -> None:
    """A rename in another file would give a name to what a crash may tear."""
    package = Path(atomic.__file__).parents[1]
    calls = [
        (str(path.relative_to(package)), node)
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    renaming = {path for path, call in calls if _renames(call)}
    # the store calls atomic.rename; a launcher reads the failure of a rank once; a shim is run
    # without the package
    exceptions = {"distributed/failure.py", "extensions/fleet/engines/shim.py"}
    assert renaming <= {"record/atomic.py", "checkpoint/store.py", *exceptions}


def _renames(call: ast.Call) -> bool:
    assert isinstance(call.func, ast.Attribute)
    path_replace = call.func.attr == "replace" and len(call.args) == 1 and not call.keywords
    return path_replace or ast.unparse(call.func).endswith((".rename", "os.replace", "shutil.move"))


def test_a_temporary_folder_of_a_killed_process_is_deleted_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from instar.record.atomic import scratch_folder\n"
        "with scratch_folder('find') as folder: (folder / 'a').touch(); os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (stale_folder,) = tmp_path.iterdir()
    (tmp_path / "instar-other-1").mkdir()
    (tmp_path / "instar-find-link").symlink_to(tmp_path / "instar-other-1")
    with scratch_folder("find") as first, scratch_folder("find") as second:
        assert first.is_dir()
        assert second.is_dir()
        assert not stale_folder.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["instar-other-1"]
