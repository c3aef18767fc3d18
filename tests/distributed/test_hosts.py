"""Two hosts: network namespaces with a link between them, whose name resolves to the loopback.

Needs root and iproute2, as the machines of continuous integration have them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from forks import forks
from started import LIMIT_S

PROGRAM = """
import os, psutil
from instar.config.schema import ParallelConfig
from instar.distributed.agree import gather
from instar.distributed.world import join
with join(ParallelConfig(timeout_s=30), "cpu") as world:
    print(os.environ["GLOO_SOCKET_IFNAME"], gather(world, world.rank), flush=True)
    tcp = psutil.Process().net_connections("tcp")
    print("listens at", {one.laddr.ip for one in tcp if one.status == "LISTEN"}, flush=True)
    gather(world, world.rank)
"""

STEPPING = """
import itertools, os, socket, time
from instar.config.schema import ParallelConfig
from instar.distributed.agree import gather
from instar.distributed.world import join
socket.sethostname(f"host-{os.environ['RANK']}")
with join(ParallelConfig(timeout_s=60, silence_s=2), "cpu") as world:
    known = time.monotonic() + 1
    for step in itertools.count():
        world.at(f"step {step}", step)
        gather(world, step)
        if known and time.monotonic() > known:
            print("stepping", flush=True)
            known = 0
"""
PORT = "29777"


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}; these tests need root"


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces; h<pid>-0 has the address 10.77.0.1, h<pid>-1 10.77.0.2."""
    names = [f"h{os.getpid()}-{number}" for number in range(2)]
    links = [f"v{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        peer = ["type", "veth", "peer", "name", links[1], "netns", names[1]]
        ip("link", "add", links[0], "netns", names[0], *peer)
        for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "route", "add", "default", "via", f"10.77.0.{3 - number}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@contextmanager
def started(
    hosts: Sequence[str],
    folder: Path,
    program: str,
    *,
    torchrun: bool = False,
    master: str = "10.77.0.1",
) -> Iterator[list[subprocess.Popen[str]]]:
    """The program as one rank on each host, started by hand or by torchrun.

    Rank 0's host is named node0, which resolves to the loopback there.
    """
    (folder / "program.py").write_text(program)
    ranks = []
    for rank, host in enumerate(hosts):
        known = folder / f"hosts-{rank}"
        node0 = "10.77.0.1" if rank else "127.0.1.1"
        own = f"127.0.1.1 {socket.gethostname()}"
        known.write_text(f"127.0.0.1 localhost\n{own}\n{node0} node0\n")
        place = {"OMP_NUM_THREADS": "1"}
        command = [str(forks().python)]
        if torchrun:
            command = [str(forks().bin / "torchrun"), "--nnodes=2", f"--node-rank={rank}"]
            command += [f"--master-addr={master}", f"--master-port={PORT}"]
        else:
            place |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
            place |= {"MASTER_ADDR": master, "MASTER_PORT": PORT, "RANK": str(rank)}
        inside = f"mount --bind {known} /etc/hosts && exec {' '.join(command)} {folder}/program.py"
        ranks.append(
            subprocess.Popen(
                ["ip", "netns", "exec", host, "unshare", "-m", "-u", "bash", "-c", inside],
                env={**os.environ, **place},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        yield ranks
    finally:
        for one in ranks:
            one.terminate()
        for one in ranks:
            one.communicate(timeout=LIMIT_S)


def said_until(rank: subprocess.Popen[str], wanted: str) -> str:
    assert rank.stdout is not None
    said = ""
    for line in rank.stdout:
        said += line
        if wanted in line:
            return said
    raise AssertionError(f"ended without {wanted!r}:\n{said}")


def test_gloo_uses_the_interface_from_which_rank_0_is_reached(
    hosts: list[str], tmp_path: Path
) -> None:
    with started(hosts, tmp_path, PROGRAM) as ranks:
        said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    for number, one in enumerate(said):
        assert f"v{os.getpid()}-{number} [0, 1]\n" in one


def test_every_rank_listens_only_at_the_address_that_the_others_come_to(
    hosts: list[str], tmp_path: Path
) -> None:
    with started(hosts, tmp_path, PROGRAM) as ranks:
        said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    for number, one in enumerate(said, 1):
        assert f"listens at {{'10.77.0.{number}'}}\n" in one


def test_a_name_that_rank_0_s_own_host_resolves_to_the_loopback_serves_the_others_with_a_warning(
    hosts: list[str], tmp_path: Path
) -> None:
    with started(hosts, tmp_path, PROGRAM, master="node0") as ranks:
        said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    assert all("[0, 1]\n" in one for one in said), said
    assert f"listens on port {PORT} of every interface, without authentication: node0 is" in said[0]


@pytest.mark.parametrize(("torchrun", "end"), [(False, 0), (False, 1), (True, 1)])
def test_ranks_on_both_ends_of_a_cut_link_end_within_the_silence_and_name_the_lost_host(
    hosts: list[str], tmp_path: Path, torchrun: bool, end: int
) -> None:
    with started(hosts, tmp_path, STEPPING, torchrun=torchrun) as ranks:
        for rank in ranks:
            said_until(rank, "stepping")
        cut = time.monotonic()
        ip("-n", hosts[end], "link", "set", f"v{os.getpid()}-{end}", "down")
        said_until(ranks[0], "no heartbeat arrives from host host-1")
        said_until(ranks[1], f"the network to rank 0 at 10.77.0.1:{PORT} is lost")
        assert time.monotonic() - cut < 2 + 3
        if not torchrun:
            assert [rank.wait(LIMIT_S) for rank in ranks] == [4, 4]
