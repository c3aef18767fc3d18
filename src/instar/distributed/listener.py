"""A port is taken by binding it, never by looking for a free one first."""

from __future__ import annotations

import errno
import socket

from instar.config.errors import ConfigError

PORT_KEY = "parallel.master_port"
ADDRESS_KEY = "parallel.master_address"


def listen(port: int, host: str = "127.0.0.1", key: str = PORT_KEY) -> tuple[int, int]:
    """A listening socket's descriptor, to hand over, and its port (asked for 0: any free one).

    Raises ConfigError, naming the port and the `key` that it comes from, where it cannot be had.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            raise _refused(host, port, key, error) from error
        bound: int = listener.getsockname()[1]
        return listener.detach(), bound


def port_in_use(host: str, port: int, key: str) -> ConfigError:
    return ConfigError.one(
        f"port {port} of {host} is in use, by another run perhaps",
        where=key,
        hint="give another one, or 0 for a free one" if key == PORT_KEY else "give another one",
    )


def _refused(host: str, port: int, key: str, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return port_in_use(host, port, key)
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return ConfigError.one(
            f"{host} is no address of this machine, where rank 0 is",
            where=ADDRESS_KEY,
            hint="127.0.0.1 serves ranks of one machine",
        )
    return ConfigError.one(f"port {port} of {host} cannot be had: {error.strerror}", where=key)
