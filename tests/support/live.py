"""What tests do to a run in this process, between its steps."""

from __future__ import annotations

from instar.checkpoint.store import Checkpoint
from instar.config.sections import Operation
from instar.run.changes import scheduled
from instar.run.checkpointing import save_checkpoint_if_due
from instar.run.start import restore as restoring
from instar.run.trainer import Trainer


def change_if_due(run: Trainer) -> bool:
    run.state, has_evaluated = scheduled.change_if_due(run.state, run.parts)
    return has_evaluated


def carry_out(run: Trainer, operation: Operation) -> None:
    run.state = scheduled.carry_out(run.state, run.parts, operation)


def restore(run: Trainer, checkpoint: Checkpoint) -> list[str]:
    """Returns the warnings."""
    run.state, warnings = restoring.restore(run.state, run.parts, checkpoint)
    return warnings


def save_when_due(run: Trainer) -> None:
    run.state = save_checkpoint_if_due(run.state, run.parts)
