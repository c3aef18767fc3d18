"""Ranks on two hosts: network namespaces with a link between them, whose names resolve to the loopback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import tiny_run
from cases import parametrize_first
from forks import forks
from two_hosts import Host, Started, two_hosts

pytestmark = pytest.mark.hosts

PROGRAM = """
import os, psutil
from instar.config.schema import ParallelConfig
from instar.distributed.agree import gather
from instar.distributed.world import join_group
with join_group(ParallelConfig(timeout_s=30), "cpu") as world:
    print(os.environ["GLOO_SOCKET_IFNAME"], gather(world, world.rank), flush=True)
    tcp = psutil.Process().net_connections("tcp")
    print("listens at", {one.laddr.ip for one in tcp if one.status == "LISTEN"}, flush=True)
    gather(world, world.rank)
"""

STEPPING = """
import itertools, time
from instar.config.schema import ParallelConfig
from instar.distributed.agree import gather
from instar.distributed.world import join_group
with join_group(ParallelConfig(timeout_s=60, silence_s=2), "cpu") as world:
    known = time.monotonic() + 1
    for step in itertools.count():
        time.sleep(0.004)
        world.at(f"step {step}", step)
        gather(world, step)
        if known and time.monotonic() > known:
            print("stepping", flush=True)
            known = 0
"""
PORT = "29777"


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with two_hosts() as pair:
        yield pair


def by_hand(
    hosts: Sequence[Host],
    place: Path,
    *words: str,
    master: str = "",
    disks: Mapping[Path, Path] | None = None,
) -> list[Started]:
    """`python WORDS` as one rank on each host. `disks`: see `Host.start`, for rank 1's."""
    ranks = []
    for rank, host in enumerate(hosts):
        environment = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "RANK": str(rank),
        }
        environment |= {"MASTER_ADDR": master or hosts[0].address, "MASTER_PORT": PORT}
        ranks.append(
            host.start([forks().python, *words], place, environment, disks if rank else None)
        )
    return ranks


def by_torchrun(hosts: Sequence[Host], place: Path, *words: str) -> list[Started]:
    where = ["--nnodes=2", f"--master-addr={hosts[0].address}", f"--master-port={PORT}"]
    command = [forks().bin / "torchrun", *where]
    return [
        host.start([*command, f"--node-rank={number}", *words], place)
        for number, host in enumerate(hosts)
    ]


@pytest.mark.parametrize("by_name", [False, True])
def test_gloo_uses_the_interface_between_the_hosts_and_ranks_listen_only_there(
    hosts: list[Host], tmp_path: Path, by_name: bool
) -> None:
    """Rank 0's host resolves its own name to the loopback; then its store listens everywhere."""
    (tmp_path / "program.py").write_text(PROGRAM)
    name = hosts[0].name
    ranks = by_hand(hosts, tmp_path, "program.py", master=name if by_name else "")
    assert [rank.finish() for rank in ranks] == [0, 0]
    for host, rank in zip(hosts, ranks, strict=True):
        assert f"{host.link} [0, 1]\n" in rank.output()
        assert by_name or f"listens at {{'{host.address}'}}\n" in rank.output()
    warning = f"listens on port {PORT} of every interface, without authentication: {name} is"
    assert (warning in ranks[0].output()) == by_name


@parametrize_first(("start", "end"), [(by_hand, 0), (by_hand, 1), (by_torchrun, 1)], first=1)
def test_ranks_on_both_ends_of_a_cut_link_end_within_the_silence_and_name_the_lost_host(
    hosts: list[Host], tmp_path: Path, start: Callable[..., list[Started]], end: int
) -> None:
    (tmp_path / "program.py").write_text(STEPPING)
    ranks = start(hosts, tmp_path, "program.py")
    for rank in ranks:
        rank.wait_for("stepping")
    cut = hosts[end].unplug()
    ranks[0].wait_for(f"no heartbeat arrives from host {hosts[1].name}")
    ranks[1].wait_for(f"the network to rank 0 at {hosts[0].address}:{PORT} is lost")
    assert time.monotonic() - cut < 2 + 3
    if start is by_hand:
        assert [rank.finish() for rank in ranks] == [4, 4]


def test_a_run_whose_folder_not_all_hosts_have_is_refused_before_anything_is_made(
    hosts: list[Host], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(tiny_run.CONFIG, encoding="utf-8")
    disks = [tmp_path / "runs", tmp_path / "disk of the other host"]
    for disk in disks:
        disk.mkdir()
    command = ["-m", "instar.train", "run.yaml"]
    ranks = by_hand(hosts, tmp_path, *command, disks={disks[0]: disks[1]})
    assert [rank.finish() for rank in ranks] == [2, 2]
    host_name, other = (host.name for host in hosts)
    message = (
        f"what rank 0 on host {host_name} writes in {disks[0]} is not seen by host {other} (rank 1)"
    )
    assert message in ranks[0].output()
    assert [list(disk.iterdir()) for disk in disks] == [[], []]
