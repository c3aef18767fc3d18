"""Every way in which people start ranks trains the same run, bit for bit; real processes, real gloo.

One test starts everything anew, under torchrun. `instar train` is in tests/torture/test_sigterm.py, and
a script that spawns new interpreters in docs/launching.md.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from cases import parametrize_first
from forks import INSTAR, Child, Forks, children_as_ranks

from instar.api import launch, train
from instar.config.errors import ConfigError
from instar.distributed.rendezvous import listen

TEXT = "".join(f"{n} squared is {n * n}, and {n} cubed is {n**3}.\n" for n in range(300))
TINY = """\
name: tiny
model: {n_layer: 2, n_head: 2, n_embd: 32, context: 16}
data: {source: squares.txt, path: tokens, tokenizer: char}
train: {until: 8it, batch_size: 6}
learning_rate: {warmup_iters: 2}
record: {sample_tokens: 4, report: false}
parallel: {world_size: 2}
"""
LAUNCHED = """\
import sys
from instar.api import launch
from instar.distributed.failure import Interrupted

try:
    print("trained in", launch("tiny.yaml", sys.argv[1:]))
except Interrupted as stopped:
    sys.exit(f"{type(stopped).__name__}: {stopped}")
"""
HANDED = """\
import sys
from pathlib import Path
from instar.distributed.launch import launch_ranks
from instar.distributed.placement import LaunchOptions
from instar.distributed.signals import exit_now
from instar.schedule.checks import load_checked

path = Path("handed.yaml")
path.write_text(Path("tiny.yaml").read_text())
loaded = load_checked(str(path), [f"record.run_dir={sys.argv[1]}"])
path.write_text("seed: [")
exit_now(launch_ranks(LaunchOptions([str(path)], 2, config=loaded.to_json())))
"""
IN_A_LOOP = """\
import sys
from instar.api import launch, train

for number in (1, 2):
    train("tiny.yaml", [f"record.run_dir={sys.argv[1]}-{number}", f"seed={number}"])
"""
LINE = r"\[RANK {rank}\] \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{{4}} (INFO|WARNING): "
LIMIT_S = 120


@pytest.fixture(scope="module")
def place(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory whose tokens are made."""
    path = tmp_path_factory.mktemp("ways")
    for name, text in {
        "squares.txt": TEXT,
        "tiny.yaml": TINY,
        "launched.py": LAUNCHED,
        "handed.py": HANDED,
        "loop.py": IN_A_LOOP,
    }.items():
        (path / name).write_text(text)
    child = forks.start(INSTAR, ["data", "prepare", "tiny.yaml"], place=path)
    assert child.finish() == 0, child.output()
    return path


Expected = Callable[[int], tuple[bytes, float]]


@pytest.fixture(scope="module")
def expected(place: Path, forks: Forks) -> Expected:
    """expected(size): the weights and the loss that so many ranks end with."""
    outcomes: dict[int, tuple[bytes, float]] = {}

    def of(size: int) -> tuple[bytes, float]:
        if size not in outcomes:
            argv = ["train", "tiny.yaml", "--set", f"record.run_dir=by-{size}"]
            end_well(children_as_ranks(forks, size, INSTAR, argv, place=place))
            outcomes[size] = outcome(place / f"by-{size}")
        return outcomes[size]

    return of


def end_well(ranks: Sequence[Child]) -> None:
    assert [rank.finish() for rank in ranks] == [0] * len(ranks), "".join(
        rank.output() for rank in ranks
    )


def outcome(run_dir: Path) -> tuple[bytes, float]:
    weights = (run_dir / "checkpoints" / "step-8" / "model.safetensors").read_bytes()
    last = json.loads((run_dir / "events.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "run_finished"
    return weights, last["loss"]


def assert_all_said_who_they_are(run_dir: Path, size: int) -> None:
    for rank in range(size):
        lines = (run_dir / "logs" / f"rank_{rank}.log").read_text().splitlines()
        assert lines[0].endswith(f"INFO: rank {rank} of {size} on cpu")
        # what libraries say on the standard streams comes here too, as it is
        own_lines = [line for line in lines if line.startswith("[RANK")]
        assert len(own_lines) > 1
        assert all(re.match(LINE.format(rank=rank), line) for line in own_lines), lines


def start(
    place: Path, *words: object, python: object = sys.executable, **variables: str
) -> subprocess.Popen[str]:
    parent_variables = {k: v for k, v in os.environ.items() if not k.startswith("INSTAR")}
    return subprocess.Popen(
        [str(python), *map(str, words)],
        cwd=place,
        env=parent_variables | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], code: int = 0) -> str:
    """What it has said by its end."""
    try:
        output = process.communicate(timeout=LIMIT_S)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, output
    return output


def free_port() -> int:
    descriptor, port = listen(0)
    os.close(descriptor)
    return port


@parametrize_first("way", ["run", "launch"], first=1)
def test_torchs_launchers_train_the_same(
    way: str, place: Path, forks: Forks, expected: Expected
) -> None:
    words = ["--nproc_per_node=2", "-m", "instar.train", "tiny.yaml"]
    words += ["--set", f"record.run_dir=by-{way}"]
    launcher = forks.start(f"torch.distributed.{way}:main", words, place=place, launches=True)
    end_well([launcher])
    assert "Traceback" not in launcher.output()
    assert outcome(place / f"by-{way}") == expected(2)
    assert_all_said_who_they_are(place / f"by-{way}", 2)


@pytest.mark.torture
@pytest.mark.parametrize("use_launcher", [True, False])
def test_a_script_that_trains_in_a_loop_makes_a_run_of_each(
    place: Path, forks: Forks, use_launcher: bool
) -> None:
    name = f"loop-{use_launcher}"
    if use_launcher:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        end(start(place, *words, "loop.py", name))
    else:
        environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        python = forks.python
        ranks = [
            start(place, "loop.py", name, python=python, **environ, RANK=str(rank))
            for rank in range(2)
        ]
        for rank in ranks:
            end(rank)
    first, second = (outcome(place / f"{name}-{number}") for number in (1, 2))
    assert first[0] != second[0]


def test_a_script_that_spawns_trains_the_same(
    place: Path, forks: Forks, expected: Expected
) -> None:
    end_well(
        [forks.start("spawned:fork_ranks", free_port(), ["record.run_dir=spawned"], place=place)]
    )
    assert outcome(place / "spawned") == expected(2)
    assert_all_said_who_they_are(place / "spawned", 2)


def test_ranks_do_not_read_again_what_their_launcher_has_read(
    place: Path, forks: Forks, expected: Expected
) -> None:
    """The file has become unreadable by the time they start."""
    end(start(place, "handed.py", "handed", python=forks.python))
    assert outcome(place / "handed") == expected(2)
    origins = [line for line in (place / "handed/run.yaml").read_text().splitlines() if "#" in line]
    assert any(line.endswith("# handed.yaml:2:9") for line in origins), origins
    assert any(line.endswith("# --set") for line in origins)


def test_two_launches_at_once_do_not_meet(place: Path, forks: Forks, expected: Expected) -> None:
    words = ["train", "tiny.yaml", "--set", "record.run_dir=typed"]
    cli_run = start(place, *words, python=forks.command)
    python_run = start(place, "launched.py", "record.run_dir=called", python=forks.python)
    assert "same as: torchrun --nproc_per_node=2 -m instar.train tiny.yaml" in end(cli_run)
    assert "/called\n" in end(python_run)
    for name in ("typed", "called"):
        assert outcome(place / name) == expected(2)
        assert_all_said_who_they_are(place / name, 2)


def slurm(forks: Forks, place: Path, size: int, step: int, run_dir: str) -> list[Child]:
    """A step of one node of a SLURM job, as `srun` starts it."""
    common = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": str(step),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": "node07",
        "SLURM_NODEID": "0",
    }
    argv = ["train", "tiny.yaml", "--set", f"record.run_dir={run_dir}"]
    return [
        forks.start(
            INSTAR,
            argv,
            place=place,
            environment=common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(size)
    ]


def test_two_steps_of_a_slurm_job_at_once_do_not_meet(
    place: Path, forks: Forks, expected: Expected
) -> None:
    steps = {size: slurm(forks, place, size, size, f"slurm-{size}") for size in (2, 3)}
    for size, ranks in steps.items():
        end_well(ranks)
        assert outcome(place / f"slurm-{size}") == expected(size)
        assert_all_said_who_they_are(place / f"slurm-{size}", size)


def test_a_slurm_job_of_one_task_starts_what_the_config_says(place: Path, forks: Forks) -> None:
    environment = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    argv = ["train", "tiny.yaml", "--dry-run"]
    child = forks.start(INSTAR, argv, place=place, environment=environment)
    assert child.finish() == 0
    assert "--nproc_per_node=2" in child.output()


def test_ranks_of_another_launch_at_the_same_port_are_sent_away(
    place: Path, forks: Forks, expected: Expected
) -> None:
    port = free_port()

    def rank(number: int, launch: str) -> Child:
        environment = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        argv = ["train", "tiny.yaml", "--set", f"record.run_dir={launch}"]
        return forks.start(
            INSTAR, argv, place=place, environment=environment | {"INSTAR_LAUNCH": launch}
        )

    first = rank(0, "first")
    first.wait_until(lambda: is_taken(port))
    second = [rank(0, "second"), rank(1, "second")]
    assert [child.finish() for child in second] == [2, 2]
    assert f"MASTER_PORT: port {port} of 127.0.0.1 is in use" in second[0].output()
    end_well([first, rank(1, "first")])
    assert outcome(place / "first") == expected(2)
    assert not (place / "second").exists()


def is_taken(port: int) -> bool:
    try:
        os.close(listen(port)[0])
    except ConfigError:
        return True
    return False


def test_a_given_port_that_is_in_use_is_named_with_its_key(place: Path, forks: Forks) -> None:
    descriptor, port = listen(0)
    try:
        sets = [f"parallel.master_port={port}", "record.run_dir=busy"]
        argv = ["train", "tiny.yaml", *(word for text in sets for word in ("--set", text))]
        child = forks.start(INSTAR, argv, place=place)
        assert child.finish() == 2
    finally:
        os.close(descriptor)
    message = f"parallel.master_port: port {port} of 127.0.0.1 is in use"
    assert child.output().count(message) == 1
    assert "Nothing was started." in child.output()
    assert not (place / "busy").exists()


def test_an_address_of_another_machine_is_refused(place: Path, forks: Forks) -> None:
    argv = ["train", "tiny.yaml", "--set", "parallel.master_address=192.0.2.1"]
    child = forks.start(INSTAR, argv, place=place)
    assert child.finish() == 2
    assert "parallel.master_address: 192.0.2.1 is not an address of this machine" in child.output()


def test_ranks_of_another_number_than_the_environment_says_are_refused(
    place: Path, forks: Forks
) -> None:
    argv = ["train", "tiny.yaml", "--nproc", "2"]
    ranks = children_as_ranks(forks, 4, INSTAR, argv, place=place)
    assert [rank.finish() for rank in ranks] == [2] * 4
    message = "--nproc 2, but the environment already sets 4 ranks"
    assert message in ranks[0].output()


def test_a_spawned_rank_that_fails_ends_all_and_is_named(place: Path, forks: Forks) -> None:
    overrides = ["record.run_dir=failed", "data.transform=spawned:spoil"]
    script = forks.start("spawned:fork_ranks", free_port(), overrides, place=place)
    assert script.finish() == 1
    assert "torch.multiprocessing.spawn.ProcessRaisedException" in script.output()
    assert re.search(r"rank 1 failed .*ValueError: boom", script.output())
    log = (place / "failed" / "logs" / "rank_1.log").read_text()
    assert re.search(r"^\[RANK 1\] \S+ \S+ ERROR: rank 1 failed at step 1: ", log, re.MULTILINE)


def assert_all_stopped_together(run_dir: Path, size: int) -> None:
    for rank in range(size):
        last = (run_dir / "logs" / f"rank_{rank}.log").read_text().splitlines()[-1]
        assert last.endswith(f"stopped: resume with: instar resume {run_dir}")
    (checkpoint,) = (run_dir / "checkpoints").glob("step-*")
    assert len(list((checkpoint / "rng").iterdir())) == size


def test_ctrl_c_stops_spawned_ranks_at_the_same_step(place: Path, forks: Forks) -> None:
    run_dir = place / "stopped-spawn"
    overrides = [f"record.run_dir={run_dir}", "train.until=1000000it"]
    script = forks.start("spawned:fork_ranks", free_port(), overrides, place=place)
    assert script.wait_for(r" loss \d")
    script.signal(signal.SIGINT, group=True)  # as a terminal does
    assert script.finish() != 0
    assert "stopped: SIGINT" in script.output()
    assert_all_stopped_together(run_dir, 2)


def test_an_interrupted_parent_stops_the_ranks_that_it_launched(place: Path, forks: Forks) -> None:
    run_dir = place / "stopped-launch"
    words = ["launched.py", f"record.run_dir={run_dir}", "train.until=1000000it"]
    process = start(place, *words, python=forks.python)
    assert process.stdout is not None
    while " loss " not in (line := process.stdout.readline()):
        assert line, "it never trained"
    os.kill(process.pid, signal.SIGINT)
    assert f"Interrupted: resume with: instar resume {run_dir}" in end(process, code=1)
    assert_all_stopped_together(run_dir, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 2}, "world_size and port need rank"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2 is not a possible rank"),
        ({"rank": 0}, "rank 0 of None is not a possible rank"),
        ({"rank": 0, "world_size": 2}, "MASTER_PORT is not set"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(None, ["device=cpu"], **arguments)  # type: ignore[arg-type]


def test_ranks_do_not_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="this process is already rank 1 of 2"):
        launch()
    with pytest.raises(ConfigError, match="the environment says rank 1 of 2"):
        train(rank=0, world_size=2)
