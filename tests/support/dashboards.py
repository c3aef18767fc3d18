"""The command `instar dashboard` as a process or in a thread."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from threading import Thread

import httpx
import pytest
import uvicorn
from forks import forks

from instar.extensions.board import catalog
from instar.extensions.board import stream as live
from instar.extensions.board.server import Ending, bind, server_config
from instar.extensions.fleet.view import site
from instar.extensions.fleet.view.site import FleetCatalog


@contextmanager
def dashboard(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Its address and its process, ended as Ctrl-C ends it if it still runs."""
    command = [str(forks().command), "dashboard", str(folder), *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        address = process.stdout.readline().strip()
        yield address, process
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()
        process.stderr.close()


def asking(address: str) -> httpx.Client:
    """A client of the dashboard at this address, with its token."""
    base, _, token = address.partition("?token=")
    return httpx.Client(base_url=base, headers={"Authorization": f"Bearer {token}"})


@contextmanager
def serve_dashboard(folder: Path, *, read_only: bool = True) -> Iterator[str]:
    """The address of one in a thread of this process, which looks at the runs more often."""
    ending = Ending()
    address = bind("127.0.0.1", 0, None)
    config = server_config(folder, address, ending, FleetCatalog, read_only=read_only)
    server = uvicorn.Server(config)
    with pytest.MonkeyPatch.context() as patch, socket(fileno=address.descriptor) as listener:
        patch.setattr(catalog, "FRESH_S", 0.1)
        patch.setattr(site, "FRESH_S", 0.1)
        patch.setattr(live, "POLL_S", 0.05)
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield address.url
        finally:
            ending.is_due = server.should_exit = True
            thread.join(20)
