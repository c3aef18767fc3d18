from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from instar.config.errors import ConfigError
from instar.config.schema import ParallelConfig
from instar.distributed.failure import RunFailed
from instar.distributed.world import join_group


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process believes to be rank 0 of 2, on one host."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (place | {"MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_one_process_needs_no_group() -> None:
    with join_group(ParallelConfig(), "cpu") as world:
        assert (world.rank, world.size, world.backend, world.is_main) == (0, 1, "none", True)
        assert not dist.is_initialized()


def test_a_device_that_is_not_there_is_named() -> None:
    with (
        pytest.raises(ConfigError, match="cuda:99 does not exist"),
        join_group(ParallelConfig(), "cuda:99"),
    ):
        pass


@pytest.mark.usefixtures("two_ranks")
def test_one_device_cannot_serve_two_ranks() -> None:
    with (
        pytest.raises(ConfigError, match="2 ranks run on this host"),
        join_group(ParallelConfig(), "cuda:0"),
    ):
        pass


def test_every_rank_misses_a_device_that_only_the_last_needs(
    two_ranks: pytest.MonkeyPatch,
) -> None:
    two_ranks.setenv("INSTAR_DEVICES", "0,99")
    with pytest.raises(ConfigError, match="does not exist"), join_group(ParallelConfig(), "cuda"):
        pass


def test_devices_are_indices(two_ranks: pytest.MonkeyPatch) -> None:
    two_ranks.setenv("INSTAR_DEVICES", "0,first")
    with (
        pytest.raises(ConfigError, match="indices such as 0,1"),
        join_group(ParallelConfig(), "cuda"),
    ):
        pass


@pytest.mark.usefixtures("two_ranks")
def test_nccl_needs_a_gpu() -> None:
    with (
        pytest.raises(ConfigError, match="nccl needs GPUs"),
        join_group(ParallelConfig(backend="nccl"), "cpu"),
    ):
        pass


def test_a_taken_port_is_named(two_ranks: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        two_ranks.setenv("MASTER_PORT", str(port))
        with (
            pytest.raises(ConfigError, match=f"MASTER_PORT: port {port} of 127.0.0.1 is in use"),
            join_group(ParallelConfig(), "cpu"),
        ):
            pass


def test_a_rank_that_does_not_come_is_named(two_ranks: pytest.MonkeyPatch) -> None:
    two_ranks.setenv("MASTER_PORT", "0")
    with (
        pytest.raises(RunFailed, match="rank 1 of 2 did not join"),
        join_group(ParallelConfig(timeout_s=0.2), "cpu"),
    ):
        pass


PROGRAM = """
import sys, time, torch, torch.distributed as dist
from instar.distributed.signals import exit_now

before, hook = dict(os.environ), sys.excepthook
try:
    with join_group(ParallelConfig(timeout_s=60), "cpu") as world:
        store = dist.distributed_c10d._get_default_store()
        facts = {"rank": world.rank, "size": world.size, "backend": world.backend,
                 "gloo": os.environ["GLOO_SOCKET_IFNAME"]}
        if world.rank == 1:
            store.wait(["rank 0 has left"])
            answer(**facts)
            store.set("rank 1 has answered", "")
            exit_now(0)
        # An exchange that rank 1, alive but silent, never joins.
        work = dist.all_reduce(torch.ones(1), async_op=True)
        started = time.monotonic()
        raise ValueError("boom")
except ValueError:
    facts["parted_s"] = time.monotonic() - started
    answer(**facts, clean=dict(os.environ) == before and sys.excepthook is hook)
    store.set("rank 0 has left", "")
    store.wait(["rank 1 has answered"])
    exit_now(0)
"""


@pytest.fixture(scope="module")
def answers(
    ranks_in: Callable[[str, int, Path], list[dict[str, Any]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """What two ranks saw that met; rank 0 then failed with an exchange still open."""
    return ranks_in(PROGRAM, 2, tmp_path_factory.mktemp("world"))


def test_ranks_meet_on_loopback(answers: list[dict[str, Any]]) -> None:
    assert [fact["rank"] for fact in answers] == [0, 1]
    for fact in answers:
        assert (fact["size"], fact["backend"]) == (2, "gloo")
        assert fact["gloo"].startswith("lo")


def test_the_environment_is_left_as_it_was(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["clean"]


def test_a_failed_rank_parts_although_a_peer_is_silent(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["parted_s"] < 10
