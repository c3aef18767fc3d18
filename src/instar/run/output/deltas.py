"""Saves the weights of a run as a chain of deltas, on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.nn import Module

from instar.checkpoint.delta.writer import DTYPES, DeltaWriter, Written
from instar.config.budget import Counters
from instar.config.sections import DeltaConfig
from instar.models.module import model_tensors


class DeltaSaver:
    """Saves deltas of a model while it trains, and reports each that is on disk."""

    def __init__(
        self,
        config: DeltaConfig,
        precision: str,
        folder: Path,
        on_written: Callable[[Counters, Written], None],
        limit_s: float = 600.0,
    ) -> None:
        """
        Args:
            precision: of the forward pass: fp32, bf16 or fp16.
            on_written: called on the calling thread, with the progress at the step of the weights.
            limit_s: longest wait for the disk, in seconds.
        """
        assert config.every is not None
        dtype = DTYPES[precision if config.dtype == "auto" else config.dtype]
        self.writer = DeltaWriter(folder, config.every, config.anchor_every, dtype, limit_s)
        self.on_written = on_written
        self._progress: dict[int, Counters] = {}
        """progress at the steps of links that are not reported yet"""

    @property
    def failure(self) -> str | None:
        """Why nothing can be saved any more, and the run must end."""
        return self.writer.failure

    def save_if_due(self, progress: Counters, model: Module, *, last: bool = False) -> None:
        """Save the weights if they are due, see `DeltaWriter`; report what is on disk by now."""
        if self.writer.due(progress.step, last=last):
            self._progress[progress.step] = progress
            self.writer.save(progress.step, model_tensors(model))
        self.report()

    def finish(self, progress: Counters, model: Module) -> None:
        """Save the last weights, and wait until all are on disk.

        Raises:
            CheckpointError: they cannot be saved.
        """
        self.save_if_due(progress, model, last=True)
        try:
            self.writer.flush()
        finally:
            self.report()

    def barrier(self) -> Callable[[], None]:
        """Return a function that waits for the links up to now; see `DeltaWriter.barrier`."""
        return self.writer.barrier()

    def close(self) -> None:
        """End the writer; see `DeltaWriter.close`."""
        self.writer.close()

    def report(self) -> None:
        """Report the deltas that were saved since the last report."""
        for delta in self.writer.written():
            self.on_written(self._progress.pop(delta.link.step), delta)
