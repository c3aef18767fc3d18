"""Locks of GPUs and ports: never two holders, held by the tree that uses them."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import stat
import time
from pathlib import Path

import figures
import pytest

from instar.config.errors import ConfigError
from instar.fleet import placement
from instar.fleet.placement import Gpu, Lock, Taken, find_gpus, lock_gpus, lock_port, try_lock

ACQUISITIONS = figures.times(600, 10_000)
GPUS = tuple(Gpu(index, str(index), f"pretended-{index}") for index in range(8))


@pytest.fixture(autouse=True)
def _own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(placement.LOCKS_VARIABLE, str(tmp_path / "locks"))


def _acquire_often(folder: str, seed: int, count: int, found: multiprocessing.Queue[int]) -> None:
    """Hold random GPUs; a file per GPU that exists already means that somebody else holds it."""
    rng, double = random.Random(seed), 0
    for _ in range(count):
        try:
            held = lock_gpus(GPUS, rng.randint(1, 4), (rng.randrange(8),), "test")
        except Taken:
            continue
        for gpu, _ in held:
            try:
                os.close(os.open(f"{folder}/{gpu.key}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                double += 1
        time.sleep(0.0005)
        for gpu, lock in held:
            Path(folder, gpu.key).unlink()
            lock.close()
    found.put(double)


def test_two_launchers_never_hold_one_gpu_twice(tmp_path: Path) -> None:
    found: multiprocessing.Queue[int] = multiprocessing.Queue()
    claims = tmp_path / "claims"
    claims.mkdir()
    each = [
        multiprocessing.Process(
            target=_acquire_often, args=(str(claims), seed, ACQUISITIONS // 2, found)
        )
        for seed in (1, 2)
    ]
    for process in each:
        process.start()
    assert [found.get(timeout=150) for _ in each] == [0, 0]
    for process in each:
        process.join()


def test_a_holder_is_named_and_its_text_cannot_reach_the_terminal() -> None:
    held = try_lock("gpu-0", "a run\x1b[31m of fleet f")
    assert isinstance(held, Lock)
    holder = try_lock("gpu-0", "another")
    assert isinstance(holder, str)
    assert "of fleet f" in holder
    assert "\x1b" not in holder
    held.close()
    assert isinstance(try_lock("gpu-0", "another"), Lock)


def test_gpus_that_others_compute_on_are_not_taken() -> None:
    busy = Gpu(0, "0", "busy", processes=(1234,))
    with pytest.raises(Taken, match="GPU 0: used by process 1234"):
        lock_gpus([busy], 1, (), "test")


def test_a_port_is_free_below_the_ephemeral_ones() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 24000))
        server.listen()
        port, lock = lock_port(24000, "test")
        assert port > 24000
        other, second = lock_port(24000, "test")
        assert other not in (24000, port)
        lock.close()
        second.close()
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))  # an ephemeral port: the only candidate
        server.listen()
        with pytest.raises(Taken, match="no port is free"):
            lock_port(server.getsockname()[1], "test")


def test_the_folder_of_locks_is_shared_and_sticky(tmp_path: Path) -> None:
    folder = placement.locks_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="sticky"):
        placement.locks_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError):
        placement.locks_folder()


@pytest.mark.parametrize("text", ["0-", "a", "1,1", "-1", "0;1", "99999999999"])
def test_gpus_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpus"):
        find_gpus(text)


def test_gpus_by_number_and_range() -> None:
    assert [gpu.index for gpu in find_gpus("3")] == [0, 1, 2]
    assert [gpu.index for gpu in find_gpus("0-2,6")] == [0, 1, 2, 6]
