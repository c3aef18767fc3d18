"""Saves the weights of a run as a chain of deltas, on rank 0."""

from __future__ import annotations

from collections.abc import Callable

from torch.nn import Module

from instar.config.budget import Counters
from instar.extensions.delta.config import delta_config
from instar.extensions.delta.events import gap_text
from instar.extensions.delta.format.folder import deltas_of
from instar.extensions.delta.writer import DTYPES, DeltaWriter
from instar.models.module import model_tensors
from instar.run.output.extension import RunExtension, RunPlace


class DeltaSaver(RunExtension):
    """Saves deltas of a model while it trains, and logs each that is on disk; on other ranks than 0, nothing."""

    finishing = "saving the last delta"

    def __init__(self, place: RunPlace) -> None:
        config = delta_config(place.config)
        assert config.every is not None
        dtype = DTYPES[place.config.precision if config.dtype == "auto" else config.dtype]
        folder = deltas_of(place.folder)
        self.writer = (
            DeltaWriter(folder, config.every, config.anchor_every, dtype, place.limit_s)
            if place.world.is_main
            else None
        )
        self.logger = place.logger
        self._progress: dict[int, Counters] = {}
        """progress at the steps of links that are not logged yet"""

    @property
    def failure(self) -> str | None:
        """Why nothing can be saved any more, and the run must end."""
        return None if self.writer is None else self.writer.failure

    def after_step(self, progress: Counters, model: Module) -> None:
        """Save the weights if they are due, see `DeltaWriter`; log what is on disk by now."""
        if self.writer is not None:
            self._save_if_due(self.writer, progress, model, last=False)

    def _save_if_due(
        self, writer: DeltaWriter, progress: Counters, model: Module, *, last: bool
    ) -> None:
        if writer.due(progress.step, last=last):
            self._progress[progress.step] = progress
            writer.save(progress.step, model_tensors(model))
        self.log_written()

    def finish(self, progress: Counters, model: Module) -> None:
        """Save the last weights, and wait until all are on disk.

        Raises:
            CheckpointError: they cannot be saved.
        """
        if self.writer is None:
            return
        self._save_if_due(self.writer, progress, model, last=True)
        try:
            self.writer.flush()
        finally:
            self.log_written()

    def barrier(self) -> Callable[[], None] | None:
        """Return a function that waits for the links up to now; see `DeltaWriter.barrier`."""
        return None if self.writer is None else self.writer.barrier()

    def close(self) -> None:
        """End the writer; see `DeltaWriter.close`."""
        if self.writer is not None:
            self.writer.close()

    def log_written(self) -> None:
        """Log the deltas that were saved since the last time."""
        for delta in self.writer.finished_links() if self.writer else ():
            progress = self._progress.pop(delta.link.step)
            self.logger.log_event(progress, delta.event(step=progress.step))
            if (missing := delta.link.missing) is not None:
                self.logger.warn(gap_text(missing, delta.link.file.name), progress.step)
