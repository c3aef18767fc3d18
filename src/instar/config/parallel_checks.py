"""Which ranks and devices go together; needs no device and no torch."""

from __future__ import annotations

from collections.abc import Iterator

from instar.config.clash import Clash
from instar.config.schema import RunConfig


def parallel_checks(config: RunConfig) -> Iterator[Clash]:
    """Everything that the config says of its ranks and contradicts itself."""
    parallel, device = config.parallel, config.device
    devices, size = parallel.devices, parallel.world_size
    repeated = sorted({index for index in devices if devices.count(index) > 1})
    if repeated:
        yield Clash(
            ("parallel.devices",),
            f"parallel.devices names {', '.join(map(str, repeated))} more than once",
            "each rank has a GPU of its own",
        )
    elif devices and size is not None and len(devices) != size:
        yield Clash(
            ("parallel.world_size", "parallel.devices"),
            f"parallel.world_size is {size}, but parallel.devices are {len(devices)}",
            "leave parallel.world_size out: there are as many ranks as devices",
        )
    if device not in ("auto", "cuda") and devices:
        yield Clash(
            ("parallel.devices", "device"),
            f"parallel.devices choose GPUs, but device is {device}",
            "leave one of them out",
        )
    if device.startswith("cuda:") and size is not None and size > 1:
        yield Clash(
            ("device", "parallel.world_size"),
            f"{device} is one device, but parallel.world_size is {size}",
            "say cuda, and choose with parallel.devices",
        )
