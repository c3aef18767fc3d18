"""What a device can do: the memory that it leaves, and its speed, measured."""

from __future__ import annotations

import math
import time

import torch

from instar.record.system import has_bf16_units

_CPU_SIDES = (128, 256, 512, 1024)
_CPU_BUDGET_S = 0.1
_GPU_SIDES = (1024, 2048, 4096, 8192)
_GPU_BUDGET_S = 0.5
MAX_REMEASUREMENTS = 3
"""number of repeated measurements of the peak: the machine may be busy when a run starts"""
_SHORT_S = {"cpu": 0.02, "cuda": 0.1}


def gpu_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU in bytes; None for other devices."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def recorded_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event for the end of what a GPU was given to do; None for other devices."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def measure_peak_flops(device: str, dtype: torch.dtype, limit_s: float | None = None) -> float:
    """Measure the peak FLOPs per second of a matrix product with the current threads and precision
    settings; a product of two n×n matrices counts 2n³.

    Tries larger matrices until the next would exceed `limit_s` (default: 0.1 s on a CPU, 0.5 s on a
    GPU). Global random generators are not used.
    """
    where = torch.device(device)
    on_gpu = where.type == "cuda"
    sides, budget_s = (_GPU_SIDES, _GPU_BUDGET_S) if on_gpu else (_CPU_SIDES, _CPU_BUDGET_S)
    generator = torch.Generator(where).manual_seed(0)
    end = time.perf_counter() + (budget_s if limit_s is None else limit_s)
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


def measure_bf16_gain() -> float:
    """Measure how many times as fast as float32 matrices one thread of the CPU multiplies those of bf16;
    by processor time, which other processes on a busy machine hardly change. Takes about 15 ms."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            pairs = [
                (torch.ones(512, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype))
                for dtype in (torch.float32, torch.bfloat16)
            ]
            best = [math.inf, math.inf]
            for _ in range(6):  # the first products pay also for choosing a kernel
                for index, (a, b) in enumerate(pairs):
                    start_s = time.thread_time()
                    a @ b
                    best[index] = min(best[index], time.thread_time() - start_s)
    finally:
        torch.set_num_threads(threads)
    return best[0] / best[1]


def torch_dtype(precision: str) -> torch.dtype:
    """Return the dtype of a precision: fp32, bf16 or fp16."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


class PeakFlops:
    """Peak FLOP/s of the device: the highest speed measured in the run itself or in matrix products
    (in the precision in use or in fp32, whichever is faster)."""

    def __init__(self, device: torch.device, precision: str, ranks: int) -> None:
        """
        Args:
            ranks: number of ranks that work concurrently, this one included.
        """
        self._device, self._ranks = device, ranks
        # compared only with itself, a slow dtype would look fast; on GPUs fp32 is never faster
        cpu_types = ("fp32",) if device.type == "cpu" else ()
        self._dtypes = {name: torch_dtype(name) for name in (*cpu_types, precision)}
        self._remaining_measurements = MAX_REMEASUREMENTS
        self._precision = precision
        self.measured_flops = {
            name: measure_peak_flops(str(device), dtype) for name, dtype in self._dtypes.items()
        }
        self._best = ranks * max(self.measured_flops.values())

    def share(self, flops_per_s: float) -> float:
        """Return the model FLOPs utilization at this speed, ≤ 1; a higher speed raises the peak."""
        self._best = max(self._best, flops_per_s)
        return flops_per_s / self._best

    def measure_again(self) -> None:
        """Measure the peak again, briefly, between two steps; at most `MAX_REMEASUREMENTS` times."""
        if self._remaining_measurements == 0:
            return
        self._remaining_measurements -= 1
        fastest = max(self.measured_flops, key=self.measured_flops.__getitem__)
        limit = _SHORT_S[self._device.type]
        speed = measure_peak_flops(str(self._device), self._dtypes[fastest], limit)
        self._best = max(self._best, self._ranks * speed)

    @property
    def warning(self) -> str:
        """Warning that the configured precision is slower than fp32 on this CPU; else empty."""
        if self._device.type != "cpu" or self._precision != "bf16" or has_bf16_units():
            return ""
        times = self.measured_flops["fp32"] / self.measured_flops["bf16"]
        if times <= 1.0:
            return ""
        return (
            "precision: bf16 on a processor without bf16 units: matrix products take "
            f"{times:.1f} times as long as in fp32; precision: auto chooses fp32 here"
        )
