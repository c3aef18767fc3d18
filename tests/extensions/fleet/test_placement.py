"""Locks of GPUs and ports: never two holders, held by the tree that uses them."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
from pathlib import Path

import pytest
from fleets import fleet_error

from instar.config.errors import ConfigError
from instar.extensions.fleet import placement
from instar.extensions.fleet.placement import (
    Gpu,
    Lock,
    Taken,
    acquire_lease,
    find_gpus,
    lock_gpus,
    lock_port,
    try_lock_resource,
)
from instar.extensions.fleet.plan import Machine, Slot

GPUS = tuple(Gpu(index, str(index), f"pretended-{index}") for index in range(8))


@pytest.fixture(autouse=True)
def _own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(placement.LOCKS_VARIABLE, str(tmp_path / "locks"))


def test_a_holder_is_named_and_its_text_cannot_reach_the_terminal() -> None:
    lock = try_lock_resource("gpu-0", "a run\x1b[31m of fleet f")
    assert isinstance(lock, Lock)
    holder = try_lock_resource("gpu-0", "another")
    assert isinstance(holder, str)
    assert "of fleet f" in holder
    assert "\x1b" not in holder
    lock.close()
    assert isinstance(try_lock_resource("gpu-0", "another"), Lock)


def test_gpus_that_others_compute_on_are_not_taken() -> None:
    busy = Gpu(0, "0", "busy", processes=(1234,))
    with pytest.raises(Taken, match="GPU 0: used by process 1234"):
        lock_gpus([busy], 1, (), "test")


def test_programs_on_gpus_are_looked_for_at_each_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    free, busy = Gpu(0, "GPU-a", "GPU-a"), Gpu(0, "GPU-a", "GPU-a", processes=(1234,))
    slot = Slot({"job": (0,)}, {"job": {}})
    monkeypatch.setattr(placement, "_real_gpus", lambda: (free,))
    acquire_lease(slot, [busy], "test").close()  # it has ended since the start
    monkeypatch.setattr(placement, "_real_gpus", lambda: (busy,))
    with pytest.raises(Taken, match="used by process 1234"):
        acquire_lease(slot, [free], "test")


def test_a_port_is_free_below_the_ephemeral_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 24000))
        server.listen()
        port, lock = lock_port(24000, "test")
        assert port > 24000
        other, second = lock_port(24000, "test")
        assert other not in (24000, port)
        lock.close()
        second.close()
        monkeypatch.setattr(placement, "_first_ephemeral", lambda: 24001)
        with pytest.raises(Taken, match="no port is free from 24000 to 24000"):
            lock_port(24000, "test")
        monkeypatch.setattr(placement, "_first_ephemeral", lambda: 1024)  # all are ephemeral
        port, lock = lock_port(24000, "test")
        assert port > 24000
        lock.close()
        with pytest.raises(Taken, match="no port is free"):
            lock_port(65536, "test")


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


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("5,3", [5, 3]),
        ("", []),
        ("-1", []),
        ("2,-1,3", [2]),
        ("GPU-4, 1", [4, 1]),
        ("0,9,1", [0]),
        ("GPU-5-8932,1", [5, 1]),
        ("1,GPU-5-8933,2", [1]),
        ("1,GPU-,2", [1]),
        ("2,MIG-1", [2, 1]),
        (None, [*range(8)]),
    ],
)
def test_a_fleet_uses_the_gpus_that_are_visible(
    visible: str | None, indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    uuids = [f"GPU-{index}-8932f937" for index in range(8)]
    real = tuple(Gpu(index, uuid, uuid) for index, uuid in enumerate(uuids))
    monkeypatch.setattr(placement, "_real_gpus", lambda: real)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.index for gpu in find_gpus(None, environ)] == indices
    if indices:
        assert [gpu.index for gpu in find_gpus("0-0", environ)] == indices[:1]
    with pytest.raises(ConfigError, match=r"there is no GPU 8; there are \d"):
        find_gpus("8-8", environ)


def test_without_a_driver_nothing_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_real_gpus", lambda: ())
    assert find_gpus(None, {"CUDA_VISIBLE_DEVICES": "0,1"}) == ()
    assert len(find_gpus("2", {"CUDA_VISIBLE_DEVICES": ""})) == 2  # pretended


def test_gpus_that_cannot_be_listed_are_no_pretended_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a driver, and nvidia-ml-py is not installed."""
    text = "name: f\njobs: {j: {command: 'true', resources: {gpus: 1}}}\n"
    no_gpus = Machine(0, 8, 1 << 40)
    monkeypatch.setattr(placement, "_real_gpus", lambda: ())
    assert "--gpus 0-7 names pretended ones" in fleet_error(tmp_path, text, machine=no_gpus)
    monkeypatch.setattr(placement, "_DRIVER_FILE", tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be listed.*'instar\[fleet\]'"):
        find_gpus("0-7", {"CUDA_VISIBLE_DEVICES": "2"})
    assert find_gpus(None, {}) == ()
    assert "'instar[fleet]' to see" in fleet_error(tmp_path, text, machine=no_gpus)


@pytest.mark.parametrize("kind", ["folder", "link", "second name", "pipe"])
def test_a_port_whose_lock_is_unusable_is_left_out_and_said(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "mine"
    target.write_text("mine")
    path = placement.locks_folder() / "port-24200.lock"
    match kind:
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(target)
        case "second name":
            os.link(target, path)
        case "pipe":
            os.mkfifo(path)
    messages: list[str] = []
    port, lock = lock_port(24200, "test", messages.append)
    lock.close()
    assert port > 24200
    assert re.search(r"port 24200 is left out: .*port-24200\.lock cannot be locked: ", messages[0])
    path.rename(path.with_name("gpu-pretended-0.lock"))
    with pytest.raises(Taken, match=r"GPU 0: .*cannot be locked"):
        lock_gpus(GPUS[:1], 1, (), "test")
    assert target.read_text() == "mine"


def test_another_users_lock_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(placement.os, "open", deny)
    messages: list[str] = []
    with pytest.raises(Taken, match=r"no port is free .*Permission denied"):
        lock_port(32760, "test", messages.append)
    assert messages


def test_without_flock_gpus_and_ports_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match=r"cannot be locked: No locks .*INSTAR_LOCK_DIR"):
        lock_port(24300, "test")
