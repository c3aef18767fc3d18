import os
import random
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from power import crashes, recording

import instar
from instar.config.errors import ConfigError
from instar.config.files import RUN_FOLDERS
from instar.config.sections import RecordConfig
from instar.record.lock import lock_owner
from instar.record.rundir import (
    LETTERS_AND_DIGITS,
    RunDir,
    RunDirBusy,
    check_run_dir,
    create_run_dir,
    find_run,
    hold,
)

BAD = {
    "holds a run": "holds another run; choose another folder, or resume that run: instar resume",
    "foreign": "is not empty: it holds thesis.tex",
    "a file": "is a file, not a folder",
    "under a file": "is a file, not a folder",
    "too long": "File name too long",
    "a zero byte": "null byte",
    "read-only": "permission denied",
}


@pytest.fixture
def bad_folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    folder = tmp_path / "folder"
    match request.param:
        case "holds a run":
            folder.mkdir()
            (folder / "run.yaml").touch()
        case "foreign":
            folder.mkdir()
            (folder / "thesis.tex").touch()
        case "a file":
            folder.touch()
        case "under a file":
            folder.touch()
            return str(folder / "run")
        case "too long":
            return str(tmp_path / ("x" * 300))
        case "a zero byte":
            return str(tmp_path / "a\0b")
        case "read-only":
            return "/proc/sys/kernel/run"  # where not even root may make a folder
    return str(folder)


def tree(path: Path) -> set[Path]:
    return set(path.rglob("*"))


def test_a_new_run_gets_a_folder_with_an_id_of_its_own(tmp_path: Path) -> None:
    record = RecordConfig(out_dir=str(tmp_path / "deep" / "runs"))
    runs = [create_run_dir(record, "grow") for _ in range(20)]
    assert len({run.path for run in runs}) == 20
    for run in runs:
        assert run.path.name == f"grow-{run.id}"
        assert len(run.id) == 5
        assert run.id[0].isalpha()
        assert set(run.id) <= set(LETTERS_AND_DIGITS)
        assert run.logs.is_dir()
        assert run.checkpoints.is_dir()


def test_the_ids_have_no_look_alikes() -> None:
    assert not set("0o1il") & set(LETTERS_AND_DIGITS)


@pytest.mark.parametrize("made_before", [False, True])
def test_a_folder_of_ones_own_is_made_or_may_be_empty_but_for_what_a_start_left(
    tmp_path: Path, made_before: bool
) -> None:
    path, left = tmp_path / "mine", set[Path]()
    if made_before:
        path.mkdir()
        left = {path / ".tmp-of-a-start"}
        for file in left:
            file.touch()
    run = create_run_dir(RecordConfig(run_dir=str(path)), "grow")
    assert run == RunDir(path)
    assert run.id == "mine"
    assert tree(path) == {run.logs, run.checkpoints, run.lock} | left


@pytest.mark.parametrize(("bad_folder", "message"), BAD.items(), indirect=["bad_folder"], ids=BAD)
def test_a_folder_that_cannot_be_the_runs_is_refused(
    tmp_path: Path, bad_folder: str, message: str
) -> None:
    before = tree(tmp_path)
    for refuse in (check_run_dir, create_run_dir):
        with pytest.raises(ConfigError) as caught:
            refuse(RecordConfig(run_dir=bad_folder), "grow")
        assert message in str(caught.value)
        assert caught.value.problems[0].where == "record.run_dir"
    assert tree(tmp_path) == before


@pytest.mark.parametrize("bad_folder", ["a file", "under a file", "too long"], indirect=True)
def test_a_folder_in_which_no_run_can_be_made_is_refused(tmp_path: Path, bad_folder: str) -> None:
    before = tree(tmp_path)
    for refuse in (check_run_dir, create_run_dir):
        with pytest.raises(ConfigError) as caught:
            refuse(RecordConfig(out_dir=bad_folder), "grow")
        assert caught.value.problems[0].where == "record.out_dir"
    assert tree(tmp_path) == before


def test_checking_makes_nothing(tmp_path: Path) -> None:
    check_run_dir(RecordConfig(out_dir=str(tmp_path / "runs")), "grow")
    check_run_dir(RecordConfig(run_dir=str(tmp_path / "mine")), "grow")
    assert tree(tmp_path) == set()


@pytest.mark.parametrize("key", ["out_dir", "run_dir"])
def test_the_name_of_a_new_run_s_folder_outlives_a_loss_of_power(tmp_path: Path, key: str) -> None:
    with recording(tmp_path) as recorder:
        record = RecordConfig(**{key: str(tmp_path / "scratch" / "runs")})  # type: ignore[arg-type]
        made = create_run_dir(record, "grow").path.relative_to(tmp_path)
        recorder.say(1)
    found = [
        crash.tree for crash in crashes(recorder.operations, random.Random(1)) if crash.last_word
    ]
    assert found
    assert all(str(made) in tree for tree in found)


def test_of_two_that_want_one_folder_one_gets_it(tmp_path: Path) -> None:
    code = (
        "import sys; from instar.config.sections import RecordConfig\n"
        "from instar.config.errors import ConfigError\n"
        "from instar.record.rundir import create_run_dir\n"
        "record = RecordConfig(run_dir=sys.argv[1]); print('ready', flush=True); input()\n"
        "try: create_run_dir(record, 'grow', lambda run: run.config.touch()); print('mine')\n"
        "except ConfigError: print('taken')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(instar.__file__).parents[1])}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "one")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert sorted(process.communicate()[0] for process in both) == ["mine\n", "taken\n"]


@pytest.fixture
def out_dir(tmp_path: Path) -> Path:
    """Three runs, the one in the middle written to last, and a foreign folder."""
    for name, age_s in [("gpt-aaaaa", 30), ("grow-bbbbb", 10), ("gpt-ccccc", 20)]:
        run = RunDir(tmp_path / name)
        run.path.mkdir()
        run.config.touch()
        run.events.touch()
        os.utime(run.config, (1e9, 1e9))
        os.utime(run.events, (1e9 - age_s, 1e9 - age_s))
    (tmp_path / "foreign").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("latest", "grow-bbbbb"),
        ("gpt-ccccc", "gpt-ccccc"),
        ("aaaaa", "gpt-aaaaa"),
        ("grow", "grow-bbbbb"),
    ],
)
def test_a_run_is_found_by_latest_folder_id_or_name(out_dir: Path, text: str, name: str) -> None:
    assert find_run(text, out_dir) == RunDir(out_dir / name)


def test_a_run_is_found_by_its_path(out_dir: Path, tmp_path: Path) -> None:
    path = out_dir / "gpt-aaaaa"
    assert find_run(str(path), tmp_path / "elsewhere") == RunDir(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt", "2 runs are named 'gpt'; say which: .*gpt-ccccc, .*gpt-aaaaa"),
        ("aaaab", "no run 'aaaab' in .*; did you mean 'aaaaa'"),
        ("zzz", "no run 'zzz' in .*; the latest is 'grow-bbbbb'"),
        ("", "no run ''"),
    ],
)
def test_what_is_no_run_is_refused_with_a_suggestion(
    out_dir: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find_run(text, out_dir)


def test_a_folder_that_is_not_a_run(out_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"foreign is not a run: it has no run\.yaml"):
        find_run(str(out_dir / "foreign"), out_dir)


def test_no_run_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="start one with instar train"):
        find_run("latest", tmp_path / "runs")


def test_paths_of_a_run() -> None:
    run = RunDir(Path("runs/grow-r7f3a"))
    assert run.id == "r7f3a"
    assert run.log(3) == Path("runs/grow-r7f3a/logs/rank_3.log")
    assert run.report == Path("runs/grow-r7f3a/report.html")


def test_asking_who_trains_never_keeps_anybody_from_training(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    asked = threading.Event()

    def ask() -> None:
        while not asked.is_set():
            lock_owner(run.lock)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(200):
            with hold(run):
                pass
    finally:
        asked.set()
        asking.join()


@pytest.mark.parametrize(
    ("folder", "lock"), [(0o755, 0o600), (0o775, 0o660), (0o777, 0o666), (0o700, 0o600)]
)
@pytest.mark.parametrize("before", [None, 0o644])
def test_only_who_may_write_a_run_can_open_its_lock(
    tmp_path: Path, folder: int, lock: int, before: int | None
) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.path.chmod(folder)
    if before is not None:
        run.lock.touch()
        run.lock.chmod(before)
    with hold(run):
        assert stat.S_IMODE(run.lock.stat().st_mode) == lock


def test_a_lock_that_is_a_link_or_a_pipe_is_not_taken(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for make in (os.symlink, os.link, lambda _, path: os.mkfifo(path)):
        make(mine, run.lock)
        assert lock_owner(run.lock) is None
        with pytest.raises(OSError, match=r"symbolic link|another name|regular"), hold(run):
            pass
        assert mine.read_text() == "mine"
        run.lock.unlink()


def test_of_a_stopped_process_that_trains_it_is_said_what_ends_it(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from instar.record.rundir import RunDir, hold\n"
        "with hold(RunDir(Path(sys.argv[1]))): os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    run = RunDir(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    try:
        os.waitpid(process.pid, os.WUNTRACED)
        with pytest.raises(RunDirBusy, match=f"stopped .*kill -KILL {process.pid}"), hold(run):
            pass
    finally:
        process.kill()
        process.wait()
    with hold(run):
        pass


@pytest.mark.parametrize("name", RUN_FOLDERS)
def test_a_run_whose_folder_is_a_link_is_not_trained(tmp_path: Path, name: str) -> None:
    """What is deleted or written there would be another run's."""
    mine, run = tmp_path / "mine", RunDir(tmp_path / "theirs")
    (mine / name).mkdir(parents=True)
    run.path.mkdir()
    for target in (mine / name, tmp_path / "nowhere", Path(name)):
        (run.path / name).symlink_to(target)
        with pytest.raises(ConfigError, match=f"{name}: a symbolic link"), hold(run):
            pass
        (run.path / name).unlink()
    (run.path / name).touch()
    with pytest.raises(ConfigError, match="not a folder"), hold(run):
        pass
    (run.path / name).unlink()
    (run.path / name).mkdir()
    link = tmp_path / "link"  # the person who types it decides on that one
    link.symlink_to(run.path)
    with hold(RunDir(link)):
        pass
