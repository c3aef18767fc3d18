"""On which device a rank works."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from instar.config.errors import ConfigError
from instar.distributed.placement import DEVICES_VARIABLE, Placement


def chosen_devices(environ: Mapping[str, str], given: Sequence[int]) -> tuple[int, ...]:
    """The GPUs of this machine's ranks: those in the environment before those `given`.

    Raises ConfigError if they are no indices.
    """
    text = environ.get(DEVICES_VARIABLE, "")
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts):
        raise _no_device(f"devices must be indices such as 0,1, not {text!r}")
    return tuple(map(int, parts)) or tuple(given)


def device_of(wanted: str, place: Placement, devices: Sequence[int]) -> torch.device:
    """The device of a rank, by its *local* rank; `devices` () are 0, 1, 2 …

    They count among the GPUs that CUDA_VISIBLE_DEVICES leaves. The devices of all ranks of this
    machine are looked at, so that all of its ranks fail alike.

    Raises ConfigError naming the one that is not there.
    """
    told = ",".join(map(str, devices))
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        if devices:
            raise _no_device(
                f"devices {told} were asked for, but "
                + ("no GPU is there" if wanted == "auto" else "the device is cpu")
            )
        return torch.device("cpu")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name, _, index = wanted.partition(":")
    if name not in ("auto", "cuda"):
        raise _no_device(f"unknown device {wanted!r}")
    if index and place.local_size > 1:
        raise _no_device(
            f"{wanted} is one device, but {place.local_size} ranks run on this host",
            hint="say cuda, and choose with --devices",
        )
    if place.own_gpu and there == 1 and not devices:
        return torch.device("cuda", 0)
    indices = [int(index)] if index else list(devices) or list(range(place.local_size))
    if len(indices) < place.local_size:
        raise _no_device(f"{place.local_size} ranks on this host, but only devices {told}")
    absent = [index for index in indices[: place.local_size] if index >= there]
    if absent:
        raise _no_device(
            f"cuda:{absent[0]} is not there: {_visible(there)}",
            hint="use fewer ranks or other devices" if there else "use cpu",
        )
    return torch.device("cuda", indices[place.local_rank])


def _visible(there: int) -> str:
    gpus = f"{there} GPU{'' if there == 1 else 's'}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return f"this host has {gpus}"
    numbers = f", counted from 0 to {there - 1}" if there > 1 else ", cuda:0" if there else ""
    return f"CUDA_VISIBLE_DEVICES={visible} leaves {gpus}{numbers}"


def _no_device(message: str, hint: str = "") -> ConfigError:
    return ConfigError.one(message, where="device", hint=hint)
