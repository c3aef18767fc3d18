"""Reads nanoGPT's `ckpt.pt` in a process with limits, which writes its tensors as safetensors.

`torch.load(weights_only=True)` runs nothing of a file, but what a file says decides how much memory and time it
takes, and its parser is written in C++. What the process answers is checked as if the file had said it.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from instar.checkpoint.manifest import CheckpointError
from instar.checkpoint.tensor_file import Outline, outlines_of, write_tensors
from instar.config.files import open_regular
from instar.data.text.foreign.limited import LIMIT_BYTES, limit_memory
from instar.processes.child import (
    AnsweringProcess,
    ProcessLost,
    exit_text,
    receive_parts,
    send_parts,
)
from instar.record.events import Count, Finite

MODEL, STATES = "model.safetensors", "states.safetensors"
"""Files of the weights, and of the optimizer's states under `<number>/<state>`"""
_KEYS = ("model", "model_args", "iter_num")
_LEAST_S, _BYTES_PER_S = 60, 10 << 20
"""how long the process may take, and more for larger files"""
_MOST_TENSORS = 100_000
_NAME = re.compile(r"[\w.]{1,200}(/\w{1,40})?", re.ASCII)
_PREFIXES = ("_orig_mod.", "module.")
"""What torch.compile and DDP put before names"""


class NanoGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter group of the optimizer."""

    params: tuple[Count, ...]
    betas: tuple[Finite, Finite] | None = None
    eps: Finite | None = None
    amsgrad: bool = False


class NanoCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What `ckpt.pt` holds besides tensors."""

    model_args: dict[str, int | Finite | bool | str | None]
    iter_num: Count
    best_val_loss: Finite | None = None
    config: dict[str, int | Finite | bool | str] = {}
    names: tuple[str, ...]
    """of the model's tensors, in its order"""
    groups: tuple[NanoGroup, ...] = ()
    """empty if there is no state of an optimizer"""


def convert_file(path: Path, folder: Path) -> NanoCheckpoint:
    """Write the tensors of a `ckpt.pt` into a folder, as `MODEL` and `STATES`, and return all else.

    Raises:
        CheckpointError: it cannot be read, takes too much, or is not a checkpoint of nanoGPT.
    """
    try:
        with open_regular(path, follow=True) as file:
            size = file.seek(0, 2)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    limit_s = _LEAST_S + size // _BYTES_PER_S
    words = str(path.absolute()), str(folder.absolute()), size, limit_s
    process = AnsweringProcess(serve_conversion, *words, env=os.environ, silent=True)
    try:
        (answer,) = process.exchange([b""])
        content = json.loads(bytes(answer))
        if "refused" in content:
            raise CheckpointError(f"{path}: {content['refused']}") from None
        return msgspec.convert(content, NanoCheckpoint)
    except ProcessLost as error:
        raise CheckpointError(f"{path}: {_cause(error.status, limit_s)}") from None
    except (ValueError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{path}: not a checkpoint of nanoGPT: {error}") from None
    finally:
        process.end(0.0)


def _cause(status: int, limit_s: int) -> str:
    if status == -signal.SIGALRM:
        return f"reading it takes more than {limit_s:,} s"
    return f"it cannot be read: the process that reads it {exit_text(status)}"


def serve_conversion(
    connection: socket.socket, path: str, folder: str, size: int, limit_s: int
) -> None:
    """Convert a file, and answer with what is no tensor, or why it is refused."""
    receive_parts(connection)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(LIMIT_BYTES + 3 * size)
    signal.alarm(limit_s)
    try:
        answer = json.dumps(_convert(Path(path), Path(folder), size))
    except MemoryError:
        answer = _refusal("it takes far more memory than it has bytes")
    except BaseException as error:  # whatever torch makes of it
        lines = str(error).splitlines() or [type(error).__name__]
        answer = _refusal(f"it cannot be read: {lines[0][:300]}")
    try:
        send_parts(connection, [answer.encode()])
    finally:
        os._exit(0)


def _refusal(why: str) -> str:
    return json.dumps({"refused": why})


def _convert(path: Path, folder: Path, size: int) -> dict[str, Any]:
    content = torch.load(path, map_location="cpu", weights_only=True)
    keys = [str(key)[:40] for key in content] if isinstance(content, dict) else []
    if not set(_KEYS) <= {*keys} or not isinstance(content["model"], dict):
        what = f"it has {', '.join(keys[:8])}" if keys else f"it is a {type(content).__name__}"
        raise ValueError(f"not a checkpoint of nanoGPT, which has {', '.join(_KEYS)}: {what}")
    weights = _plain(content["model"], size)
    names = {name: _without_prefixes(name) for name in weights}
    model = {names[name]: tensor for name, tensor in weights.items()}
    optimizer = content.get("optimizer")
    states, groups = _states(optimizer) if isinstance(optimizer, dict) else ({}, [])
    states = _plain(states, size)
    _write(folder / MODEL, model)
    _write(folder / STATES, states)
    config = content.get("config")
    return {
        "model_args": dict(content["model_args"]),
        "iter_num": int(content["iter_num"]),
        "best_val_loss": _number(content.get("best_val_loss")),
        "config": {
            name: value
            for name, value in (config.items() if isinstance(config, dict) else ())
            if isinstance(name, str) and isinstance(value, str | int | float)
        },
        "names": [*model],
        "groups": groups,
    }


def _states(optimizer: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the states of parameters by `<number>/<state>`, and the groups."""
    states = {
        f"{int(number)}/{name}": value if isinstance(value, torch.Tensor) else torch.tensor(value)
        for number, values in optimizer["state"].items()
        for name, value in values.items()
        if value is not None
    }
    groups = [
        {key: group[key] for key in ("params", "betas", "eps", "amsgrad") if key in group}
        for group in optimizer["param_groups"]
    ]
    return states, groups


def _plain(tensors: Mapping[Any, Any], size: int) -> dict[str, torch.Tensor]:
    """Return tensors, whose memory a file of this size can fill.

    Raises:
        ValueError: one is something else, or they claim more memory: rows may repeat the same bytes.
    """
    if len(tensors) > _MOST_TENSORS:
        raise ValueError(f"it has {len(tensors):,} tensors")
    room = 2 * size
    for name, tensor in tensors.items():
        if not _NAME.fullmatch(str(name)):
            raise ValueError(f"{str(name)[:80]!r} is no name of a tensor")
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise ValueError(f"{name} is no tensor with all its elements")
        room -= Outline.of(tensor).size_bytes
        if room < 0:
            raise ValueError("its tensors have more elements than the file")
    return {str(name): tensor.detach() for name, tensor in tensors.items()}


def _write(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    write_tensors(file, outlines_of(tensors), lambda name: tensors[name].contiguous())


def _without_prefixes(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _number(value: Any) -> float | None:
    with suppress(TypeError, ValueError, RuntimeError):
        number = float(value)
        return number if math.isfinite(number) else None
    return None
