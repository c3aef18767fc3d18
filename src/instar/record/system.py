"""What a run runs on: versions, machine, memory, and the speed that can be had from it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

import instar
from instar.distributed.cores import cores

if TYPE_CHECKING:
    import torch

_LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers", "msgspec")
_CPU_SIDES = (128, 256, 512, 1024)
_CPU_BUDGET_S = 0.1
_GPU_SIDES = (1024, 2048, 4096, 8192)
_GPU_BUDGET_S = 0.5


def versions() -> dict[str, str]:
    """Instar's, Python's and the libraries' versions, without importing any of them; and the git
    commit of the working directory, where it has one. They are those of this process's beginning.
    """
    return dict(_versions())


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    found = {"instar": instar.__version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if commit := git_commit(Path.cwd()):
        found["commit"] = commit
    return tuple(found.items())


def git_commit(folder: Path) -> str | None:
    """The commit that is checked out in `folder`; None without a repository or without git."""
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=2,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def machine(device: str = "cpu") -> dict[str, str | int | float | None]:
    """Host, platform, CPU, cores (usable by this process, and all), memory in bytes; for a CUDA
    device also its name, memory and the number of them.
    """
    facts: dict[str, str | int | float | None] = {
        "host": platform.node(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": cores(),
        "cores_total": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }
    if device.startswith("cuda"):
        import torch

        gpu = torch.cuda.get_device_properties(torch.device(device))
        facts |= {
            "gpu": gpu.name,
            "gpus": torch.cuda.device_count(),
            "gpu_memory_bytes": gpu.total_memory,
            "cuda": torch.version.cuda,
        }
    return facts


def cpu_model() -> str:
    """As the kernel names it; the architecture where it does not."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Model"):
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return int(psutil.Process().memory_info().rss)


def memory_bytes(device: str = "cpu") -> int:
    """What counts as a run's memory: the peak allocated on a CUDA device, else resident memory."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated(torch.device(device)))
    return resident_bytes()


def measure_peak_flops(device: str, dtype: torch.dtype) -> float:
    """The most FLOPs per second that a matrix product reaches here and now, with the threads and
    precision settings in force: a product of two n×n matrices counts 2n³.

    Tries growing squares as long as the next one fits the budget: 0.1 s on a CPU, 0.5 s on a GPU.
    Draws from a generator of its own.
    """
    import torch

    where = torch.device(device)
    on_gpu = where.type == "cuda"
    sides, budget_s = (_GPU_SIDES, _GPU_BUDGET_S) if on_gpu else (_CPU_SIDES, _CPU_BUDGET_S)
    generator = torch.Generator(where).manual_seed(0)
    end = time.perf_counter() + budget_s
    best = 0.0
    with torch.inference_mode():
        for side in sides:
            a_NN = torch.randn(side, side, device=where, generator=generator).to(dtype)
            a_NN @ a_NN  # the first product of a size also pays for choosing a kernel
            seconds = float("inf")
            for _ in range(2):
                if on_gpu:
                    torch.cuda.synchronize(where)
                start = time.perf_counter()
                a_NN @ a_NN
                if on_gpu:
                    torch.cuda.synchronize(where)
                seconds = min(seconds, time.perf_counter() - start)
            best = max(best, 2 * side**3 / seconds)
            if time.perf_counter() + 3 * 8 * seconds > end:
                break
    return best
