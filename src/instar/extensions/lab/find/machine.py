"""What a machine has for training: its devices and their speed, its network, memory, disk and limits.

Each check is a line of `instar doctor`. None changes anything, but for a file that is removed at once.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from instar.config.schema import RunConfig
from instar.distributed.launch import threads_per_rank
from instar.distributed.placement import is_loopback
from instar.processes.cores import usable_cores
from instar.record.device import measure_peak_flops, torch_dtype
from instar.record.format import bytes_text
from instar.record.system import cpu_model
from instar.run.start.rank_consistency import bf16_gain, is_bf16_faster

_BLOCK_BYTES = 8 << 20
_DISK_BYTES = 256 << 20
_DISK_S = 2.0
_COPIED_BYTES = 64 << 20
_LITTLE_DISK_BYTES = 20 << 30
_LITTLE_SHM_BYTES = 1 << 30
_FEW_FILES = 4096
_SLOW_DISK = 100e6
"""bytes per second"""


@dataclass(frozen=True)
class MachineCheck:
    """What was found. `advice` is empty unless something should be changed."""

    what: str
    found: str
    advice: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    """measured or counted, in bytes, seconds, or FLOPs per second"""


@dataclass(frozen=True)
class Verdict:
    """The checks, and the settings with which Instar would train here, by key."""

    checks: tuple[MachineCheck, ...]
    settings: dict[str, str | int]


def examine(
    folder: Path, *, quick: bool = False, say: Callable[[str], None] = lambda _: None
) -> Verdict:
    """Examine this machine; takes less than a minute, and a second or two if `quick`.

    Args:
        folder: of runs; need not exist.
        quick: do not compile, and measure no speed.
        say: called with what is examined next.
    """
    devices = [torch.device("cuda", index) for index in range(_gpus())] or [torch.device("cpu")]
    checks = [_devices(devices), _precisions(devices[0])]
    if not quick:
        say("measuring matrix products")
        checks += [_products(devices[0]), _copies(devices[0])]
    checks += [*_nccl(devices), _host()]
    if not quick:
        say("compiling a small function")
        checks.append(_compiles(devices[0]))
    checks += [_memory(), _shared_memory(), _cores(), _files()]
    say(f"writing to the disk of {folder}")
    checks.append(_disk(folder, 0.0 if quick else _DISK_S))
    return Verdict(tuple(checks), _settings(devices))


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _devices(devices: list[torch.device]) -> MachineCheck:
    name = f"torch {torch.__version__}"
    if devices[0].type == "cuda":
        cards = [torch.cuda.get_device_properties(device) for device in devices]
        kinds = sorted({f"{card.name}, {bytes_text(card.total_memory)}" for card in cards})
        advice = "" if len(kinds) == 1 else "ranks wait for the slowest: choose with --devices"
        text = f"{len(cards)} × {'; '.join(kinds)}; {name}, CUDA {torch.version.cuda}"
        return MachineCheck("devices", text, advice, {"gpus": len(cards)})
    advice = ""
    if Path("/proc/driver/nvidia/version").exists():
        advice = "there is an NVIDIA driver, but torch sees no GPU: " + (
            "CUDA_VISIBLE_DEVICES hides them, or the driver is older than torch's CUDA"
            if torch.version.cuda
            else "this torch is built for CPUs; install one for CUDA, see pytorch.org"
        )
    return MachineCheck("devices", f"no GPU, {cpu_model()}; {name}", advice, {"gpus": 0})


def _precisions(device: torch.device) -> MachineCheck:
    gain = bf16_gain(device)
    wide = is_bf16_faster(gain)
    units = ["bf16"] if wide else []
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        units += ["fp16"] if (major, minor) >= (7, 0) else []
        units += ["TF32"] if major >= 8 else []
    advice = "" if wide or device.type == "cpu" else "use precision: fp16"
    text = ", ".join(units) or "float32 only"
    if device.type == "cpu" and gain:
        text += f"; bf16 products {gain:.1f} times as fast as float32"
    return MachineCheck("fast matrix units for", text, advice)


def _products(device: torch.device) -> MachineCheck:
    before = torch.get_float32_matmul_precision()
    rates: dict[str, float] = {}
    try:
        torch.set_float32_matmul_precision("highest")
        for name in ("fp32", "bf16", "fp16"):
            rates[name] = measure_peak_flops(str(device), torch_dtype(name))
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            rates["tf32"] = measure_peak_flops(str(device), torch.float32)
    finally:
        torch.set_float32_matmul_precision(before)
    text = ", ".join(f"{name} {rate / 1e12:.3g} TFLOPs/s" for name, rate in rates.items())
    return MachineCheck("matrix products", text, "", rates)


def _copies(device: torch.device) -> MachineCheck:
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    rates = {"memory": _rate(lambda: source.clone())}
    if device.type == "cuda":
        pinned_tensor = source.pin_memory()
        on_gpu = pinned_tensor.to(device)

        def back_and_forth() -> None:
            on_gpu.copy_(pinned_tensor, non_blocking=True)
            pinned_tensor.copy_(on_gpu, non_blocking=True)
            torch.cuda.synchronize(device)

        rates["to and from the GPU"] = 2 * _rate(back_and_forth)
    text = ", ".join(f"{name} {bytes_text(rate)}/s" for name, rate in rates.items())
    return MachineCheck("copies", text, "", rates)


def _rate(copy: Callable[[], object]) -> float:
    """Return the bytes per second of the fastest of some copies of `_COPIED_BYTES`."""
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - start)
    return _COPIED_BYTES / min(seconds)


def _nccl(devices: list[torch.device]) -> Iterator[MachineCheck]:
    """All-reduce a tensor over all local devices."""
    if devices[0].type == "cpu":
        return
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    tensors = [torch.ones(_COPIED_BYTES // 4, device=device) for device in devices]
    try:
        torch.cuda.nccl.all_reduce(tensors)  # type: ignore[no-untyped-call]
        start = time.perf_counter()
        torch.cuda.nccl.all_reduce(tensors)  # type: ignore[no-untyped-call]
        for device in devices:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        wrong = any(tensor[-1].item() != len(devices) ** 2 for tensor in tensors)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        advice = "run with NCCL_DEBUG=INFO; parallel.backend: gloo trains without it, slowly"
        yield MachineCheck("NCCL", f"{version}: the all-reduce failed: {reason}", advice)
        return
    rate = _COPIED_BYTES / seconds
    advice = "the sum is wrong: try NCCL_P2P_DISABLE=1, and check the machine" if wrong else ""
    text = f"{version}, all-reduce over {len(devices)}: {bytes_text(rate)}/s"
    yield MachineCheck("NCCL", text, advice, {"bytes_per_s": rate})


def _host() -> MachineCheck:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        message = "with several hosts, set MASTER_ADDR to an address"
        return MachineCheck("host's name", f"{name} has no address", message)
    links = [
        f"{link} {address.address}"
        for link, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and not is_loopback(address.address)
    ]
    text = f"{name} is {address}; interfaces: {', '.join(links) or 'only the loopback'}"
    advice = ""
    if is_loopback(address) and links:
        advice = "the name is a loopback: with several hosts, set MASTER_ADDR to an address"
    return MachineCheck("host's name", text, advice)


def _compiles(device: torch.device) -> MachineCheck:
    start = time.perf_counter()
    try:
        function = torch.compile(lambda x: torch.nn.functional.gelu(x * 2.0).sum())
        function(torch.ones(64, 64, device=device)).item()
    except Exception as error:  # of a compiler, a cache folder, a driver …
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        advice = "train with compile: false, or install a C++ compiler and Python's headers"
        return MachineCheck("torch.compile", f"does not work: {reason[:200]}", advice)
    finally:
        torch.compiler.reset()
    seconds = time.perf_counter() - start
    return MachineCheck("torch.compile", f"works, {seconds:.1f} s", "", {"seconds": seconds})


def _memory() -> MachineCheck:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    text = f"{bytes_text(memory.available)} of {bytes_text(memory.total)} available"
    text += f", {bytes_text(swap.total)} swap" if swap.total else ""
    return MachineCheck("memory", text, "", {"bytes": memory.total, "available": memory.available})


def _shared_memory() -> MachineCheck:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return MachineCheck("/dev/shm", "does not exist", "NCCL and workers need it between ranks")
    advice = (
        "" if free >= _LITTLE_SHM_BYTES else "NCCL needs more: start containers with --shm-size=8g"
    )
    return MachineCheck("/dev/shm", f"{bytes_text(free)} free", advice, {"free": free})


def _cores() -> MachineCheck:
    usable, physical = usable_cores(), psutil.cpu_count(logical=False)
    threads = os.environ.get("OMP_NUM_THREADS")
    text = f"{usable} of {os.cpu_count()} usable, {physical or '?'} physical"
    text += f"; OMP_NUM_THREADS={threads}" if threads else ""
    ranks = max(1, _gpus())
    advice = (
        f"fewer than two cores for each of {ranks} GPUs" if _gpus() and usable < 2 * ranks else ""
    )
    return MachineCheck("CPU cores", text, advice, {"usable": usable})


def _files() -> MachineCheck:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = soft == resource.RLIM_INFINITY or soft >= _FEW_FILES
    limit_text = "any number" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    limit = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    advice = "" if is_enough else f"ulimit -n {limit}, for many shards or workers"
    return MachineCheck("open files", f"{limit_text} allowed", advice)


def _disk(folder: Path, limit_s: float) -> MachineCheck:
    """Write and sync a file until `limit_s` seconds have passed."""
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    what, free = f"disk of {folder}", shutil.disk_usage(parent).free
    text, advice, figures = f"{bytes_text(free)} free", "", {"free": float(free)}
    if not os.access(parent, os.W_OK):
        return MachineCheck(what, text, f"{parent} is not writable: set record.out_dir", figures)
    if free < _LITTLE_DISK_BYTES:
        advice = "little for checkpoints: set record.out_dir, or checkpoint.keep_last"
    if limit_s and free > 2 * _DISK_BYTES:
        rate = figures["bytes_per_s"] = _write_rate(parent, limit_s)
        text += f", {bytes_text(rate)}/s written and synced"
        advice = advice or ("saves will take long" if rate < _SLOW_DISK else "")
    return MachineCheck(what, text, advice, figures)


def _write_rate(folder: Path, limit_s: float) -> float:
    block, size, start = os.urandom(_BLOCK_BYTES), 0, time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        while size < _DISK_BYTES and time.perf_counter() - start < limit_s:
            file.write(block)
            file.flush()
            os.fdatasync(file.fileno())
            size += _BLOCK_BYTES
    return size / (time.perf_counter() - start)


def _precision(devices: list[torch.device]) -> str:
    """Return what `precision: auto` would be."""
    if not all(is_bf16_faster(bf16_gain(device)) for device in devices):
        return "fp32"
    return "bf16" if devices[0].type == "cuda" else "bf16, of small models fp32"


def _settings(devices: list[torch.device]) -> dict[str, str | int]:
    """Return what the settings `auto`, and those left out, would be here, of a language model."""
    config = RunConfig()
    on_gpu = devices[0].type == "cuda"
    ranks = len(devices)
    threads = threads_per_rank(ranks)
    with suppress(ValueError):
        threads = int(os.environ["OMP_NUM_THREADS"]) if "OMP_NUM_THREADS" in os.environ else threads
    return {
        "device": devices[0].type,
        "ranks": ranks,
        "precision": _precision(devices),
        "parallel.strategy": config.parallel.strategy,
        "parallel.backend": "none"
        if ranks == 1
        else "nccl, gloo for control"
        if on_gpu
        else "gloo",
        "threads per rank": threads,
        "data.workers": config.data.workers if config.data else 0,
    }
