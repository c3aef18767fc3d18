"""What the phases of a run pass on: the request, the plan made of it, and what a rank has opened."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from instar.checkpoint.store import Checkpoint
from instar.config.load import Loaded
from instar.distributed.rank_log import RankLog
from instar.distributed.signals import StopSignal
from instar.distributed.world import World
from instar.record.console import Console
from instar.run.origin.resume import Continuation, Resume
from instar.run.start.preflight import Prepared
from instar.run.start.weights import OpenedWeights
from instar.schedule.operations import State


@dataclass(frozen=True)
class RunRequest:
    """What a rank is asked to do; the same on all ranks."""

    loaded_config: Loaded
    resume: Resume | None = None
    """how to resume a run; None: a new run, unless the config or a restart says otherwise"""
    launch_key: str = ""
    """under which the run is found again after its ranks were restarted"""
    only_test: bool = False
    """train no steps; run the final test of the checkpoint that `resume` names"""
    profiled_steps: int = 0
    """number of steps to profile, on every rank"""
    hooks: Sequence[object] = ()
    """called during training, see `instar.run.step.hooks`"""


@dataclass
class RankContext:
    """What one rank has opened for a run."""

    world: World
    log: RankLog
    signal: StopSignal
    console: Console
    record: ExitStack
    """closed after the process group is left, which knows at its end who was lost"""
    live: ExitStack
    """closed while the process group is still there"""
    weights: OpenedWeights | None = field(default=None, repr=False)
    """on rank 0, those that the run starts from, until its model has them"""


@dataclass(frozen=True)
class ResolvedRun:
    """Which run it is, and from where it goes on."""

    request: RunRequest
    loaded_config: Loaded
    """the config that is in force from here on"""
    resume: Resume | None = None
    """None: a new run"""
    checkpoint: Checkpoint | None = None
    """None: nothing was saved yet"""
    continuation: Continuation | None = None
    """of a resumed run"""
    warnings: Sequence[str] = ()
    """why later checkpoints were passed over"""


@dataclass(frozen=True)
class RunPlan:
    """A run that all ranks have checked and agreed on; nothing of it is created yet."""

    run: ResolvedRun
    prepared_run: Prepared
    initial: State | None
    """settings and architecture at step 0, of a resumed run"""
    warnings: Sequence[str]
    """logged at the start"""
    precision_reason: str
    """why `precision: auto` is what it is; empty if the config names it"""
