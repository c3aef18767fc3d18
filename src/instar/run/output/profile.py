"""Profiles a few steps of a run with torch.profiler: a trace per rank, and the most expensive operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from instar.logs.text.stdout import align_columns
from instar.record.atomic import TMP, rename

UNPROFILED = 3
"""First steps of the process, which also compile, allocate and choose kernels."""
MAX_EVENTS = 500_000
"""Bound of the events in a trace: some 150 MB of JSON, 15 MB compressed."""
_ROWS = 10
_OUTSIDE = "step, outside operators"


class StepProfiler:
    """Profiles consecutive steps of training; it changes no number of the run.

    The first step that it observes only determines how many events a step has. Without effect after
    the last one.
    """

    def __init__(
        self, steps: int, trace: Path, device: torch.device, say: Callable[[str], None]
    ) -> None:
        """
        Args:
            steps: number of steps in the trace; fewer if they had more than `MAX_EVENTS`.
            trace: file to write, ending in .json.gz.
            say: prints a line.
        """
        self.steps, self.trace, self.device, self.say = steps, trace, device, say
        self._n_steps = self._n_traced = 0
        self._n_wanted: int | None = None
        self._profile: profile | None = None

    def step(self) -> AbstractContextManager[None]:
        """Return the context manager of the next step."""
        self._n_steps += 1
        if self._n_steps <= UNPROFILED or self._n_traced == self._n_wanted:
            return nullcontext()
        return self._measuring() if self._n_wanted is None else self._tracing()

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        with self._new() as profiler:
            yield
        limit = MAX_EVENTS // max(1, len(profiler.events() or ()))
        self._n_wanted = max(1, min(self.steps, limit))

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        if self._profile is None:
            self._profile = self._new()
            self._profile.start()
        with record_function(_OUTSIDE):
            yield
        self._n_traced += 1
        if self._n_traced == self._n_wanted:
            self._finish(self._profile)

    def close(self) -> None:
        """Write what was traced if the run ends before the last step to be profiled."""
        if self._profile is not None and self._n_traced:
            self._finish(self._profile)
        elif self._n_traced == 0:
            self.say(
                f"nothing was profiled: the run ended before step {UNPROFILED + 2} of this process"
            )

    def _new(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        return profile(activities=activities)

    def _finish(self, profiler: profile) -> None:
        profiler.stop()
        self._profile, self._n_wanted = None, self._n_traced
        self.trace.parent.mkdir(exist_ok=True)
        # not atomic_file: torch compresses by the name's suffix
        temporary = self.trace.with_name(f"{TMP}{self.trace.name}")
        profiler.export_chrome_trace(str(temporary))
        rename(temporary, self.trace)
        for line in operator_table(profiler.key_averages(), gpu=self.device.type == "cuda"):
            self.say(line)
        fewer = f" of {self.steps}" if self._n_traced < self.steps else ""
        self.say(
            f"profiled {self._n_traced}{fewer} steps: open {self.trace} in https://ui.perfetto.dev"
        )


class OperatorTimes(Protocol):
    """An entry of torch's `key_averages()`; times in µs, without those of operators called inside."""

    key: str
    count: int
    self_cpu_time_total: float
    self_device_time_total: float


def operator_table(operators: Any, *, gpu: bool) -> list[str]:
    """Return lines of the operators with the largest times of their own, on the GPU or else the CPU."""

    def cost(operator: OperatorTimes) -> float:
        return operator.self_device_time_total if gpu else operator.self_cpu_time_total

    by_cost: list[OperatorTimes] = sorted(operators, key=cost, reverse=True)
    total = sum(map(cost, by_cost)) or 1.0
    headers = ["operator", "calls", "CPU ms", *(["GPU ms"] if gpu else []), "share"]
    rows = [
        [
            operator.key[:60],
            f"{operator.count:,}",
            f"{operator.self_cpu_time_total / 1e3:,.1f}",
            *([f"{operator.self_device_time_total / 1e3:,.1f}"] if gpu else []),
            f"{cost(operator) / total:.1%}",
        ]
        for operator in by_cost[:_ROWS]
    ]
    return align_columns([headers, *rows], right=range(1, len(headers)))
