"""Ranks that hang are ended and named; ranks that only take their time are not."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from cases import parametrize_first
from toy_room import Mishap, Room, ends

from instar.distributed.failure import PeerLost, RankMissing
from instar.distributed.heartbeat import Heartbeat, _key
from instar.distributed.watchdog import StoreAddress, WatchdogLimits, this_host, watch_ranks


@contextmanager
def paused_processes(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def let_pass(seconds: float) -> None:
    """The passing of this time is what is tried, not something waited for."""
    threading.Event().wait(seconds)


def test_a_rank_that_sleeps_before_a_meeting_is_named_by_all_with_its_line(tmp_path: Path) -> None:
    room = Room(tmp_path, silence_s=2, timeout_s=2, mishap=Mishap("sleep", 1, "evaluation"))
    with room.launch() as ranks:
        assert ranks.exit_codes() == [4]
        assert ranks.seconds_since_mishap([0, 1]) <= room.timeout_s + 2
        summary = ranks.output()
    expected = "rank 1 has not entered a collective (gathering answers) for 2 s: it is in eval"
    for log in (summary, room.log(0), room.log(1)):
        assert expected in log
        assert "toy_room.py" in log
    # Each rank's log shows where it was itself.
    assert "time.sleep(10 * LIMIT_S)" in room.log(1)
    assert "time.sleep(10 * LIMIT_S)" not in room.log(0)


def test_a_rank_that_sleeps_in_a_backward_pass_is_named(tmp_path: Path) -> None:
    """Ranks meet there in a collective that nobody counts."""
    room = Room(tmp_path, silence_s=2, timeout_s=2, mishap=Mishap("sleep", 1, "backward"))
    with room.launch() as ranks:
        assert ranks.exit_codes() == [4]
        assert ranks.seconds_since_mishap([0, 1]) <= room.timeout_s + 2
        output = ranks.output()
    assert re.search(r"all other ranks wait for rank 1: it is in step \d+, at toy_room.py", output)


@pytest.mark.torture
def test_a_group_that_is_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    """Ctrl-Z and fg, or a suspended machine: nobody has moved, and nobody is to blame."""
    room = Room(tmp_path, silence_s=1.0, timeout_s=2.0)
    with room.without_launcher() as ranks:
        ranks.wait_for("stepping-0", "stepping-1")
        with paused_processes(room.pid(0), room.pid(1)):
            let_pass(3 * room.timeout_s)
        ranks.wait_for_step(int((tmp_path / "weights-1").read_text()) + 50)
        for rank in (0, 1):
            os.kill(room.pid(rank), signal.SIGTERM)
        assert ranks.exit_codes() == [75, 75]


@pytest.mark.torture
def test_ranks_go_on_while_their_launcher_and_its_store_are_stopped(tmp_path: Path) -> None:
    room = Room(tmp_path, silence_s=1.0, timeout_s=2.0)
    with room.launch() as ranks:
        ranks.wait_for("stepping-0", "stepping-1")
        with paused_processes(psutil.Process(room.pid(0)).ppid()):
            let_pass(3 * room.timeout_s)
            ranks.wait_for_step(int((tmp_path / "weights-1").read_text()) + 50)
        ranks.wait_for_step(int((tmp_path / "weights-1").read_text()) + 50)
        ranks.processes[0].terminate()
        assert ranks.exit_codes() == [75]


def test_a_frozen_rank_that_serves_the_store_is_named(tmp_path: Path) -> None:
    room = Room(tmp_path, silence_s=2, mishap=Mishap("freeze", 0, "step"))
    with room.without_launcher() as ranks:
        assert ranks.seconds_since_mishap([1]) <= room.silence_s + 2
        assert ranks.processes[1].wait(5) == 4
    assert re.search(
        r"rank 0 has not answered for \d s: last seen in .*step \d+; the store at", room.log(1)
    )


def test_a_killed_rank_that_serves_the_store_is_named(tmp_path: Path) -> None:
    room = Room(tmp_path, mishap=Mishap("kill", 0, "step"))
    with room.without_launcher() as ranks:
        assert ranks.seconds_since_mishap([1]) <= 2
        assert ranks.processes[1].wait(5) == 4
    assert re.search(r"rank 0 is gone: last seen in .*step \d+; lost the store at", room.log(1))


def test_ranks_stop_and_save_when_torchrun_is_killed(tmp_path: Path) -> None:
    room = Room(tmp_path)
    with room.torchrun() as ranks:
        ranks.wait_for("stepping-0", "stepping-1")
        ranks.processes[0].kill()
        ranks.wait_for("saved-0", "saved-1")
    assert (tmp_path / "saved-0").read_text() == (tmp_path / "saved-1").read_text()
    # Whoever notices it first asks all to stop, and the other may be done before it has noticed.
    assert any("lost the store at " in room.log(rank) for rank in (0, 1))


@pytest.mark.parametrize("place", ["step", "backward", "evaluation"])
def test_a_frozen_rank_ends_with_the_others_when_its_launcher_is_killed(
    tmp_path: Path, place: str
) -> None:
    """Its launcher has the store, so that no silence can be heard; in a backward pass, nobody counts who has come."""
    mishap = Mishap("freeze", 0, place)
    room = Room(tmp_path, silence_s=1.0, timeout_s=2.0, mishap=mishap)
    with room.launch() as ranks:
        ranks.wait_for("happened")
        ranks.processes[0].kill()
        assert ranks.seconds_since(time.time(), [1]) <= room.silence_s + room.timeout_s + 3
        assert ends(room.pid(0))


@parametrize_first("share", [0.8, 0.0], first=1)
def test_a_rank_that_fell_silent_just_before_the_store_was_lost_is_named(
    tmp_path: Path, share: float
) -> None:
    """As where the ranks of another host have found it, and left with their launcher and its store; or at that
    moment: then the state of its process tells."""
    room = Room(tmp_path, silence_s=2.0, timeout_s=60.0)
    with room.launch() as ranks:
        ranks.wait_for("stepping-0", "stepping-1")
        let_pass(room.silence_s / 2)  # until each has heard the other
        os.kill(room.pid(0), signal.SIGSTOP)
        let_pass(share * room.silence_s)
        ranks.processes[0].kill()
        assert ranks.seconds_since(time.time(), [1]) <= 2 * room.silence_s + 3
        assert ends(room.pid(0))
    assert re.search(r"rank 0 has sent no heartbeat for \d+ s", room.log(1))


def test_a_rank_that_failed_alone_is_named_by_the_others(tmp_path: Path) -> None:
    room = Room(tmp_path, mishap=Mishap("fail", 1, "backward"))
    with room.launch() as ranks:
        assert ranks.exit_codes() == [4]
        assert re.search(r"rank 1 failed at step \d+: OSError: the disk is gone", ranks.output())
    assert "rank 1 failed: OSError: the disk is gone" in room.log(0)


@pytest.mark.parametrize(("size", "interval_s"), [(2, 0.5), (100, 1.0), (1000, 10.0)])
def test_the_more_ranks_the_rarer_the_heartbeats(size: int, interval_s: float) -> None:
    assert WatchdogLimits.of(60, 600, size).interval_s == interval_s


def test_silence_is_never_longer_than_a_wait() -> None:
    assert WatchdogLimits.of(silence_s=60, timeout_s=8, size=2) == WatchdogLimits(8, 8, 0.5)


LIMITS = WatchdogLimits(silence_s=60.0, wait_s=60.0, interval_s=0.05)
OF_A_GPU = (
    "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported at "
    "some other API call, so the stacktrace below might be incorrect.",
    "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress'",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle, opa, opb)`",
)
OF_NCCL = (
    "NCCL communicator was aborted on rank 0.",
    "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error",
)


def error_of(error: Exception, store: dist.Store) -> BaseException:
    """What the first of two ranks raises if its body raises `error`."""
    with (
        pytest.raises((RuntimeError, PeerLost)) as failure,
        watch_ranks(store, StoreAddress("launcher", None), 0, 2, LIMITS),
    ):
        raise error
    return failure.value


@contextmanager
def peer(store: dist.Store, failure: BaseException | None = None) -> Iterator[None]:
    """The second rank, which waits until the first has ended, or has failed before."""
    start, over = threading.Event(), threading.Event()

    def live() -> None:
        with (
            suppress(RuntimeError),
            watch_ranks(store, StoreAddress("launcher", None), 1, 2, LIMITS),
        ):
            start.set()
            if failure is not None:
                raise failure
            over.wait()

    thread = threading.Thread(target=live)
    thread.start()
    start.wait()
    if failure is not None:
        thread.join()
    yield
    over.set()
    thread.join()


@pytest.mark.parametrize("text", [*OF_A_GPU, *OF_NCCL])
def test_what_a_gpu_says_that_lost_its_peer_is_not_the_cause(text: str) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    last = Heartbeat(*(9, 120, "step 120", 7, 0, "", 0.0, "", False, this_host(), dead.pid))
    store = dist.HashStore()
    store.set(_key(1), last.encode())
    error = error_of(RuntimeError(text), store)
    assert isinstance(error, PeerLost)
    assert "rank 1 is gone, last seen in step 120" in str(error)
    assert text.partition("\n")[0] in str(error)


@pytest.mark.parametrize("text", [OF_A_GPU[1], "CUDA error: out of memory", "boom"])
def test_what_a_gpu_says_whose_peers_live_is_the_cause(text: str) -> None:
    store, error = dist.HashStore(), RuntimeError(text)
    with peer(store):
        assert error_of(error, store) is error


def test_of_two_gpus_that_fail_the_first_is_the_cause() -> None:
    store = dist.HashStore()
    with peer(store, RuntimeError(OF_A_GPU[1])):
        error = error_of(RuntimeError(OF_A_GPU[0]), store)
    assert f"rank 1 failed: RuntimeError: {OF_A_GPU[1]}" in str(error)


class EndingStore:
    """A store whose launcher ends, or to which the network is cut: from then on it does not answer."""

    def __init__(self) -> None:
        self.store, self.has_ended, self.cut = dist.HashStore(), False, False
        self.over = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.cut:
            self.over.wait()
        if self.has_ended:
            raise RuntimeError("Connection reset by peer")
        return getattr(self.store, name)


def write_heartbeats(store: EndingStore, places: Mapping[int, tuple[str, str]]) -> None:
    """Heartbeats of other ranks, by their host and address."""
    usual: tuple[Any, ...] = (9, 120, "step 120", 7, 0, "", 0.0, "", False)
    for rank, (host, address) in places.items():
        beat = Heartbeat(*usual, host, os.getpid(), address=address)
        store.store.set(_key(rank), beat.encode())


def test_the_host_to_which_the_lost_connection_led_is_named_though_the_store_ended_first() -> None:
    store = EndingStore()
    places = {1: (this_host(), "10.77.0.1"), 2: ("node1 pid:[1]", "10.77.0.2")}
    write_heartbeats(
        store, places | {3: ("node1 pid:[1]", "10.77.0.2"), 4: ("node2 pid:[1]", "10.77.0.3")}
    )

    def lose_the_connection() -> None:
        with watch_ranks(store, StoreAddress("10.77.0.1:29778", None), 0, 5, LIMITS):
            let_pass(0.5)
            store.has_ended = True
            raise RuntimeError("Read error [10.77.0.2]:13548: Connection reset by peer")

    with pytest.raises(PeerLost) as error:
        lose_the_connection()
    names = re.findall(r"rank \d on host \w+", str(error.value))
    assert names == ["rank 2 on host node1", "rank 3 on host node1"]
    assert "lost the store at 10.77.0.1:29778" in str(error.value)


@contextmanager
def address_of(*, answers: bool) -> Iterator[str]:
    """Of a host that refuses connections, which is an answer, or does not say anything to who would connect."""
    with ExitStack() as sockets:
        server = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = server.getsockname()
        if answers:
            server.close()
        for _ in range(0 if answers else 4):  # the kernel lets further ones wait
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        yield ":".join(map(str, address))


@parametrize_first("answers", [False, True], first=1)
def test_a_lost_network_is_named_though_a_rank_of_this_host_left_because_of_it(
    answers: bool,
) -> None:
    """Its end breaks a connection within the host. A store whose host answers is not lost to the network."""
    store = EndingStore()
    write_heartbeats(
        store, dict.fromkeys((0, 1), ("node0 pid:[1]", "10.77.0.1")) | {3: (this_host(), "::1")}
    )
    limits = WatchdogLimits(silence_s=4.0, wait_s=60.0, interval_s=0.05)

    def lose_a_connection(address: str) -> None:
        with watch_ranks(store, StoreAddress(address, None), 2, 4, limits):
            let_pass(0.5)
            store.cut = True
            let_pass(2.5)
            raise RuntimeError("Read error [::1]:13548: Connection reset by peer")

    with address_of(answers=answers) as address:
        try:
            with pytest.raises(RankMissing) as error:
                lose_a_connection(address)
        finally:
            store.over.set()
    names = re.findall(r"rank \d on host \w+", str(error.value))
    assert names == ["rank 0 on host node0", "rank 1 on host node0"]
    message = f"the network to rank 0 at {address} is lost: no answer for"
    assert (message in str(error.value)) is not answers
    assert (f"lost the store at {address}" in str(error.value)) is answers
