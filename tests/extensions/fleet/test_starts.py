"""When services are ready by a connection, and how far apart processes start."""

from __future__ import annotations

import asyncio
import socket

import pytest
from fleets import FleetPlace, starts

from instar.extensions.fleet.health import Checker, Unhealthy
from instar.extensions.fleet.launcher import stagger_pause_s
from instar.extensions.fleet.spec import Healthcheck

GAP_S = 0.3
SERVER = (
    "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
    "while True: s.accept()[0].close()"
)


def test_a_service_is_ready_when_the_named_port_accepts_and_starts_are_apart(
    place: FleetPlace,
) -> None:
    (place.path / "server.py").write_text(SERVER)
    place.write(f"""
name: apart
matrix: {{seed: [0, 1, 2]}}
stagger: {{services: {GAP_S}s, jobs: {2 * GAP_S}s}}
services:
  server:
    command: [python3, -I, -S, server.py, "${{ports.second}}"]
    ports: [first, second]
    healthcheck: {{tcp: true, port: second, start_period: 60s}}
    stop: {{grace: 2s}}
jobs:
  job: {{command: "true", depends_on: {{server: service_healthy}}}}
""")
    code, output = place.run("up", "fleet.yaml")
    assert code == 0, output
    for process, gap_s in (("server", GAP_S), ("job", 2 * GAP_S)):
        first, second, third = starts(place.path / "fleets" / "apart", process)
        assert second - first >= gap_s - 0.05, process
        assert third - second >= gap_s - 0.05, process


def test_a_connection_is_what_tcp_asks_for() -> None:
    async def check(port: int) -> None:
        checker = Checker(Healthcheck(tcp=True), port, {}, {})
        try:
            await checker.check(10.0, probe=True)
        finally:
            await checker.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        asyncio.run(check(port))
    with pytest.raises(Unhealthy, match="Connect call failed"):
        asyncio.run(check(port))


def test_a_pause_ends_whatever_the_file_of_the_last_start_says() -> None:
    for last_start, wait_s in ((b"98.0", 3.0), (b"90.0", 0.0), (b"100.0", 5.0), (b"1e9", 5.0)):
        assert stagger_pause_s(last_start, 5.0, 100.0) == wait_s
    for content in (b"", b"nan", b"-inf", b"inf", b"soon", b"\xff", b"9" * 64):
        assert 0 <= stagger_pause_s(content, 5.0, 100.0) <= 5.0, content
