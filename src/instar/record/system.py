"""The system a run uses, told without torch: versions, machine, memory, and what becomes of memory that is freed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

import instar
from instar.processes.child import c_library
from instar.processes.cores import usable_cores

_LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers", "msgspec")
CPUINFO = Path("/proc/cpuinfo")
PROCESS = Path("/proc/self")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
_BF16_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
"""parameters of glibc's mallopt"""
_LARGEST_KEPT_BYTES = 1 << 30
_ALL_BYTES = (1 << 31) - 1


def versions() -> dict[str, str]:
    """Return the versions of Instar, Python and libraries, without importing them, and the git
    commit of the working directory, if any, as at the first call."""
    return dict(_versions())


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    versions = {"instar": instar.__version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if commit := git_commit(Path.cwd()):
        versions["commit"] = commit
    return tuple(versions.items())


def git_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in `folder`; None without a repository or git."""
    try:
        process = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=2,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip() if process.returncode == 0 else None


def machine(device: str = "cpu") -> dict[str, str | int | float | None]:
    """Return host, platform, CPU, cores (usable by this process, and all) and memory in bytes; for
    a CUDA device also its name, memory and the number of devices."""
    facts: dict[str, str | int | float | None] = {
        "host": platform.node(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
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


def host_bytes() -> int:
    """Return memory and swap space of this machine in bytes."""
    return int(psutil.virtual_memory().total + psutil.swap_memory().total)


def cpu_model() -> str:
    """Return the CPU model as the kernel names it, else the architecture."""
    return _cpuinfo("model name", "Model") or platform.processor() or platform.machine()


def has_bf16_units() -> bool:
    """Return whether the CPU has bf16 matrix instructions (AVX-512 BF16 or AMX on x86, BF16 on ARM) and
    ONEDNN_MAX_CPU_ISA allows oneDNN to use them."""
    instruction_sets = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    if not any(
        part in instruction_sets for part in ("ALL", "DEFAULT", "BF16", "FP16", "AMX", "AVX10")
    ):
        return False
    return not _BF16_UNITS.isdisjoint(_cpuinfo("flags", "Features").split())


def _cpuinfo(*names: str) -> str:
    """Return the first value with one of these names in /proc/cpuinfo, or an empty string."""
    with suppress(OSError), CPUINFO.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() in names:
                return value.strip()
    return ""


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes(device: str, *, reset: bool = False) -> int:
    """Return the peak memory of this process on a device since the last reset, in bytes: of a CPU what is resident.

    Args:
        reset: afterwards, the peak begins anew.
    """
    if not device.startswith("cuda"):
        return _peak_resident_bytes(reset=reset)
    import torch

    peak = int(torch.cuda.max_memory_reserved(device))
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return peak


def usable_bytes(device: str) -> int:
    """Return the memory of a device that this process may use in all, in bytes: what it has and what is
    available, within the limit of its control group."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    free = [int(psutil.virtual_memory().available)]
    with suppress(OSError, ValueError, IndexError):
        group = PROCESS.joinpath("cgroup").read_text().split("0::/")[1].split()
        folder = CONTROL_GROUPS.joinpath(*group)
        # a limit of "max" is not a number: there is none
        limit, used = (int((folder / f"memory.{n}").read_text()) for n in ("max", "current"))
        cached_bytes = int(
            (folder / "memory.stat").read_text().split("inactive_file ")[1].split()[0]
        )
        free.append(limit - used + cached_bytes)
    return resident_bytes() + min(free)


def _peak_resident_bytes(*, reset: bool = False) -> int:
    """Return the peak resident memory since the last reset; where the kernel does not tell, the present one."""
    peak = 0
    with suppress(OSError, ValueError, IndexError):
        status = PROCESS.joinpath("status").read_text()
        peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
    if reset:
        with suppress(OSError):
            PROCESS.joinpath("clear_refs").write_text("5")
    return peak or resident_bytes()


def memory_bytes(device: str = "cpu") -> int:
    """Return the peak memory allocated on a CUDA device, else the resident memory, in bytes."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated(torch.device(device)))
    return resident_bytes()


def keep_freed_memory(*, all_of_it: bool = False) -> None:
    """Make glibc keep the memory of freed large arrays for later ones. Linux with glibc only.

    By default glibc returns arrays of megabytes to the system, and the next ones page-fault on
    fresh zeroed pages, which doubles the time to read a batch of tokens, and adds a sixth to a step of
    124 M parameters, whose gradients are new at each.

    Args:
        all_of_it: of arrays of any size, for a process that makes one large tensor after another: it
            then holds what it held at most.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(c_library(), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_TRIM_THRESHOLD, _ALL_BYTES)
    if all_of_it:
        mallopt(_MMAP_MAX, 0)
        mallopt(_ARENA_MAX, 1)  # those of other threads hold no large arrays
    else:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
