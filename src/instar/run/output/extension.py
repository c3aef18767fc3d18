"""What extensions do during a run, on every rank: after a step, around saves, and at its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.nn import Module

from instar.config.budget import Counters
from instar.config.schema import RunConfig
from instar.distributed.world import World
from instar.extensions import active_extensions, load_target
from instar.record.rundir import RunDir
from instar.run.output.run_logger import RunLogger

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunPlace:
    """The run that an extension takes part in."""

    config: RunConfig
    world: World
    folder: Path
    logger: RunLogger
    limit_s: float
    """longest wait for the disk, in seconds"""


class RunExtension:
    """What an extension does during a run; as it stands here, nothing. All ranks have one."""

    finishing = "ending an extension"
    """what `finish` does, for an error"""

    @property
    def failure(self) -> str | None:
        """Why rank 0 cannot go on and the run must end."""
        return None

    def after_step(self, progress: Counters, model: Module) -> None:
        """Called between two steps, before a checkpoint of the step is saved. No collective."""

    def barrier(self) -> Callable[[], None] | None:
        """Return what a checkpoint waits for before it is published; None: nothing."""
        return None

    def finish(self, progress: Counters, model: Module) -> None:
        """Called before the run's last checkpoint, on all ranks.

        Raises:
            CheckpointError: what the extension writes is not complete; the checkpoint is saved nevertheless.
        """

    def close(self) -> None:
        """End; also after a failure."""


def open_extensions(place: RunPlace) -> list[RunExtension]:
    """Return what the extensions of a run do in it."""
    hooks = [extension.hook for extension in active_extensions(place.config.extension_names)]
    opened_hooks = (load_target(hook)(place) for hook in hooks if hook)
    return [extension for extension in opened_hooks if extension is not None]


def barrier_of(extensions: Sequence[RunExtension]) -> Callable[[], None] | None:
    """Return what a checkpoint waits for; None: nothing."""
    barriers = [barrier for extension in extensions if (barrier := extension.barrier())]

    def wait() -> None:
        for barrier in barriers:
            barrier()

    return wait if barriers else None


def end_extensions(run_dir: RunDir, config: RunConfig) -> None:
    """Tell extensions on rank 0 that a run has ended; a failure of theirs is only a warning."""
    for extension in active_extensions(config.extension_names):
        if extension.at_end:
            try:
                load_target(extension.at_end)(run_dir, config)
            except Exception as error:
                name, kind = extension.name, type(error).__name__
                logger.warning("extension %s: %s: %s", name, kind, error)
