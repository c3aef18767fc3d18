"""A room of ranks that step, evaluate and save for ever, until a mishap comes over one of them.

Run as a module it is one rank, or, without RANK in the environment, Instar's launcher of some.
Imported, it starts them in three ways and tells how they ended.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forks import forks

if TYPE_CHECKING:
    from instar.distributed.rank_log import RankLog
    from instar.distributed.signals import StopSignal

LIMIT_S = 120.0
STEP_S = 0.004
"""at least: ranks that step as fast as they can leave nothing of the processors to others"""


@dataclass(frozen=True)
class Mishap:
    """What happens to `rank` when it comes to `place`: start, step, backward, evaluation, saving.

    kill, freeze (as by SIGSTOP), sleep, fail, or nothing. It comes `after_s` seconds after the
    rank began to train, when the others know where it is. After `starts` starts, no more.
    """

    kind: str = "nothing"
    rank: int = 1
    place: str = "step"
    starts: int = 10**6
    after_s: float = 1.0


@dataclass(frozen=True)
class Room:
    """A room's folder, size, limits in seconds, and mishap; it ends at `last` steps."""

    folder: Path
    size: int = 2
    silence_s: float = 2.0
    timeout_s: float = 60.0
    mishap: Mishap = Mishap()
    last: int = 10**9

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"folder": str(self.folder)})

    @classmethod
    def from_json(cls, text: str) -> Room:
        fields = json.loads(text)
        mishap = Mishap(**fields.pop("mishap"))
        return cls(**fields | {"folder": Path(fields["folder"]), "mishap": mishap})

    def launch(self, max_restarts: int = 0) -> Ranks:
        """Under Instar's launcher."""
        return Ranks(self, [[forks().python, __file__, self.to_json(), str(max_restarts)]])

    def torchrun(self, max_restarts: int = 0) -> Ranks:
        """Under plain torchrun."""
        command = [str(forks().bin / "torchrun"), "--standalone"]
        command += [f"--nproc-per-node={self.size}", f"--max-restarts={max_restarts}"]
        return Ranks(self, [[*command, __file__, self.to_json()]])

    def without_launcher(self) -> Ranks:
        """As `srun` would: no launcher, and rank 0 serves the store."""
        return Ranks(
            self, [[forks().python, __file__, self.to_json()]] * self.size, with_ranks=True
        )

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"rank_{rank}.log").read_text(encoding="utf-8")

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def mishap_time(self) -> float:
        """When the mishap came, in seconds since the epoch."""
        return float((self.folder / "happened").read_text())


class Ranks:
    """A room's processes under way; leave the `with` and none is left."""

    def __init__(
        self, room: Room, commands: Sequence[Sequence[str]], *, with_ranks: bool = False
    ) -> None:
        self.room = room
        room.folder.mkdir(parents=True, exist_ok=True)
        port = str(_free_port())
        self.processes = []
        for rank, command in enumerate(commands):
            place = {"RANK": str(rank), "WORLD_SIZE": str(room.size)} if with_ranks else {}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if with_ranks else {}
            environment = {
                k: v for k, v in os.environ.items() if not k.startswith(("INSTAR", "TORCHEL"))
            }
            with (room.folder / f"said-{rank}").open("wb") as output:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                        env=environment | {"OMP_NUM_THREADS": "1"} | place,
                    )
                )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for pid in self.pids():
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)

    def output(self) -> str:
        files = sorted(self.room.folder.glob("said-*"))
        return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)

    def wait_for(self, *names: str) -> None:
        """Wait until the ranks have written all these files."""
        self._wait_until(lambda: all((self.room.folder / name).exists() for name in names))

    def wait_for_step(self, step: int) -> None:
        """Wait until all ranks have saved at this step or a later one."""
        files = [self.room.folder / f"weights-{rank}" for rank in range(self.room.size)]
        self._wait_until(lambda: all(int(file.read_text()) >= step for file in files))

    def _wait_until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline, self.output()
            assert any(map(is_running, self.pids())), self.output()
            time.sleep(0.005)

    def pids(self) -> list[int]:
        """Of all that was started here, and of the ranks."""
        ranks = [int(file.read_text()) for file in self.room.folder.glob("pid-*")]
        return [process.pid for process in self.processes] + ranks

    def exit_codes(self, limit_s: float = LIMIT_S) -> list[int]:
        """Wait for the end of all that was started here; their exit codes."""
        deadline = time.monotonic() + limit_s
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"never ended:\n{self.output()}") from None
        return [process.returncode for process in self.processes]

    def seconds_since_mishap(self, ranks: Sequence[int]) -> float:
        """Wait until these ranks' processes are gone; how long after the mishap that was."""
        self.wait_for("happened")
        return self.seconds_since(self.room.mishap_time(), ranks)

    def seconds_since(self, moment: float, ranks: Sequence[int]) -> float:
        """Wait until these ranks' processes are gone; how long after `moment` that was."""
        deadline = time.monotonic() + LIMIT_S
        while any(is_running(self.room.pid(rank)) for rank in ranks):
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.005)
        return time.time() - moment


def is_running(pid: int) -> bool:
    """Whether the process is there and more than an entry in the table."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def ends(pid: int, within_s: float = 5.0) -> bool:
    """Whether the process, which was killed, ends: one with much memory takes a moment to give it back."""
    deadline = time.monotonic() + within_s
    while is_running(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _one_rank(room: Room) -> int:
    """One rank's life, as rank.py leads it."""
    from instar.distributed.rank_log import running_rank
    from instar.distributed.signals import StopSignal, exit_with_parent

    exit_with_parent(os.environ)
    rank, start = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    _write(room.folder / f"pid-{rank}", str(os.getpid()))

    begun_s = math.inf

    def come_to(place: str, step: int) -> None:
        nonlocal begun_s
        mishap = room.mishap
        if step == 1:
            begun_s = min(begun_s, time.monotonic())
        early = step > 0 and time.monotonic() < begun_s + mishap.after_s
        if (
            (rank, place) != (mishap.rank, mishap.place)
            or start >= mishap.starts
            or early
            or step == 1
        ):
            return
        if mishap.kind != "nothing":
            _write(room.folder / "happened", str(time.time()))
        if mishap.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif mishap.kind == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif mishap.kind == "sleep":
            time.sleep(10 * LIMIT_S)
        elif mishap.kind == "fail":
            raise OSError("the disk is gone")

    come_to("start", 0)
    with StopSignal() as stop, running_rank() as rank_run:
        _train(room, rank_run.log, stop, come_to)
    return rank_run.code


def _train(room: Room, log: RankLog, stop: StopSignal, come_to: Callable[[str, int], None]) -> None:
    import torch
    import torch.distributed as dist

    from instar.config.schema import ParallelConfig
    from instar.distributed.agree import (
        Flag,
        FlagReducer,
        agree,
        gather,
        raise_on_all_ranks,
        reduce_sums,
    )
    from instar.distributed.failure import Interrupted
    from instar.distributed.signals import training_started
    from instar.distributed.world import join_group, recall, remember

    _write(room.folder / f"coming-{log.rank}", "")
    config = ParallelConfig(silence_s=room.silence_s, timeout_s=room.timeout_s)
    with join_group(config, "cpu") as world:
        log.open(room.folder)
        common_dir = agree(world, recall("run_dir") if world.is_main else None)
        if world.is_main and common_dir is None:
            run_dir = f"{room.folder}/run-{os.getpid()}"
            _write(room.folder / "first-run", run_dir)
            remember("run_dir", run_dir)
        _write(room.folder / f"met-{log.rank}-{os.environ.get('TORCHELASTIC_RESTART_COUNT')}", "")
        with (room.folder / f"found-{log.rank}").open("a") as file:
            file.write(f"{common_dir}\n")
        pulse, gradient = FlagReducer(world), torch.ones(1000)
        training_started()
        for step in range(1, room.last + 1):
            log.step = step
            time.sleep(STEP_S)
            world.at(f"step {step}", step)
            come_to("step", step)
            beat = pulse.send(Flag.STOP if stop.requested else Flag.NONE)
            if beat.wait().stop:
                gather(world, log.rank)
                _write(room.folder / f"saved-{log.rank}", str(step))
                raise Interrupted("resume with: the same command")
            come_to("backward", step)
            # As in a backward pass: a collective that the room knows nothing of.
            if world.size > 1:
                dist.all_reduce(gradient.fill_(1.0))
            world.at(f"evaluation at step {step}")
            come_to("evaluation", step)
            reduce_sums(world, {"loss": 1.0})
            world.at(f"saving at step {step}")
            with raise_on_all_ranks(world, "saving"):
                come_to("saving", step)
                _write(room.folder / f"weights-{log.rank}", str(step))
            if step == 3:
                _write(room.folder / f"stepping-{log.rank}", "")


def _write(path: Path, text: str) -> None:
    temp_path = path.with_name(f".{path.name}")
    temp_path.write_text(text)
    temp_path.replace(path)


if __name__ == "__main__":
    from instar.distributed.signals import exit_now

    toy_room = Room.from_json(sys.argv[1])
    if "RANK" in os.environ:
        exit_now(_one_rank(toy_room))
    from instar.distributed.launch import launch_ranks
    from instar.distributed.placement import LaunchOptions

    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    )
    options = LaunchOptions(
        [sys.argv[1]], toy_room.size, module="toy_room", max_restarts=int(sys.argv[2])
    )
    exit_now(launch_ranks(options))
