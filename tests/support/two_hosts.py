"""Hosts as network namespaces of one machine: joined by a veth pair, or by a wire that delays and loses packets.

A host has its own interfaces, name, /etc/hosts and, where asked for, its own disk. Needs root and iproute2, as the
machines of continuous integration have them (`make hosts`).
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shlex
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from forks import LIMIT_S

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_OWN = ("unshare", "-m", "-u")
"""mounts and a host name of its own"""


def ip(*words: str) -> str:
    result = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"ip {' '.join(words)}: {result.stderr}; these tests need root"
    return result.stdout


@dataclass(frozen=True)
class Wire:
    """What happens to each packet between two hosts, in either direction."""

    delay_s: float = 0.0
    loss: float = 0.0


@dataclass
class Started:
    """A command on a host; all that it says is in the file `output_path`."""

    process: subprocess.Popen[bytes]
    output_path: Path

    def output(self) -> str:
        return self.output_path.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while text not in self.output():
            code = self.process.poll()
            assert code is None or text in self.output(), f"no {text!r}:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {text!r} for {limit_s} s:\n{self.output()}"
            time.sleep(0.01)

    def finish(self, limit_s: float = LIMIT_S) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended within {limit_s} s:\n{self.output()}") from None


@dataclass
class Host:
    """One of the hosts: `name` is its namespace and its host name, `link` its interface to the others."""

    name: str
    address: str
    link: str
    hosts_file: str
    """the content of its /etc/hosts"""
    commands: list[Started] = field(default_factory=list)

    def start(
        self,
        command: Sequence[object],
        place: Path,
        environment: Mapping[str, str] | None = None,
        disks: Mapping[Path, Path] | None = None,
    ) -> Started:
        """Start a command in the folder `place`. `disks`: folders that only this host sees, and where they are."""
        number = len(self.commands)
        hosts = place / f"hosts-{self.name}"
        hosts.write_text(self.hosts_file)
        mounts = [
            (hosts, Path("/etc/hosts")),
            *((source, at) for at, source in (disks or {}).items()),
        ]
        inside = [f"mount --bind {shlex.quote(str(a))} {shlex.quote(str(b))}" for a, b in mounts]
        inside += [f"hostname {self.name}", f"cd {shlex.quote(str(place))}"]
        inside += [f"exec {shlex.join(map(str, command))}"]
        output_path = place / f"said-{self.name}-{number}"
        with output_path.open("wb") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *_OWN, "sh", "-c", " && ".join(inside)],
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                stdout=file,
                stderr=file,
            )
        self.commands.append(Started(process, output_path))
        return self.commands[-1]

    def unplug(self) -> float:
        """Cut its link; the time of it."""
        ip("-n", self.name, "link", "set", self.link, "down")
        return time.monotonic()

    def plug_in(self) -> None:
        ip("-n", self.name, "link", "set", self.link, "up")

    def processes(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def kill(self) -> float:
        """End everything that runs on it at once; the time of it.

        All are stopped first: a rank of a host that is gone sees no end of the others there, and says nothing of it.
        """
        while pids := self.processes():
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
            for command in self.commands:
                command.process.poll()
        return time.monotonic()


@contextmanager
def two_hosts(wire: Wire | None = None) -> Iterator[list[Host]]:
    """Two hosts, node0 at 10.77.0.1 and node1 at 10.77.0.2, whose own names resolve to 127.0.1.1, as on Debian.

    Nothing runs on them afterwards.
    """
    names = [f"node{number}-{os.getpid()}" for number in range(2)]
    links = [f"v{number}-{os.getpid()}" for number in range(2)]
    addresses = ["10.77.0.1", "10.77.0.2"]
    hosts = []
    for number, name in enumerate(names):
        other = f"{addresses[1 - number]} {names[1 - number]}"
        hosts_file = f"127.0.0.1 localhost\n127.0.1.1 {name}\n{other}\n"
        hosts.append(Host(name, addresses[number], links[number], hosts_file))
    with _namespaces(names), closing(_join(names, links, wire)):
        for host in hosts:
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.link)
            ip("-n", host.name, "link", "set", "lo", "up")
            ip("-n", host.name, "link", "set", host.link, "up")
        try:
            yield hosts
        finally:
            for host in hosts:
                host.kill()
                for command in host.commands:
                    command.process.wait(LIMIT_S)


@contextmanager
def _namespaces(names: Sequence[str]) -> Iterator[None]:
    try:
        for name in names:
            ip("netns", "add", name)
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _join(names: Sequence[str], links: Sequence[str], wire: Wire | None) -> _Forwarder:
    """Give each namespace an end of one link."""
    if wire is None:
        peer = ["type", "veth", "peer", "name", links[1], "netns", names[1]]
        ip("link", "add", links[0], "netns", names[0], *peer)
        return _Forwarder([], Wire())
    ends = [_tunnel(link) for link in links]
    for name, link in zip(names, links, strict=True):
        ip("link", "set", link, "netns", name)
    return _Forwarder(ends, wire)


def _tunnel(link: str) -> int:
    """Make an interface whose packets this process reads and writes; its descriptor."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", link.encode(), _IFF_TUN | _IFF_NO_PI))
    return end


class _Forwarder:
    """Carries packets between two tunnels: `tc netem` for kernels that are built without it."""

    def __init__(self, ends: Sequence[int], wire: Wire) -> None:
        self._ends, self._wire = ends, wire
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._forward, daemon=True, name="wire")
        self._thread.start()

    def _forward(self) -> None:
        rng, on_the_way, number = random.Random(0), list[tuple[float, int, int, bytes]](), 0
        while True:
            due_s = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
            ready = select.select([self._stop_reader, *self._ends], [], [], due_s)[0]
            if self._stop_reader in ready:
                return
            for end in ready:
                with suppress(OSError):  # the interface is down
                    packet = os.read(end, 1 << 16)
                    if rng.random() >= self._wire.loss:
                        to = self._ends[1 - self._ends.index(end)]
                        number += 1
                        at = time.monotonic() + self._wire.delay_s
                        heapq.heappush(on_the_way, (at, number, to, packet))
            while on_the_way and on_the_way[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(on_the_way)
                with suppress(OSError):
                    os.write(to, packet)

    def close(self) -> None:
        os.close(self._stop_writer)  # its other end becomes readable
        self._thread.join(LIMIT_S)
        for descriptor in (self._stop_reader, *self._ends):
            os.close(descriptor)
