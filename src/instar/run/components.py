"""Components of a run on one rank: mutable objects that are opened and closed, unlike its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from instar.checkpoint.manifest import RunStart
from instar.config.budget import Budget
from instar.config.schema import RunConfig
from instar.data.loader import Prefetcher
from instar.data.source import Source
from instar.distributed.rank_log import RankLog
from instar.distributed.world import World
from instar.run.output.extension import RunExtension
from instar.run.output.inspection import TextSampler, WeightAnalyzer
from instar.run.output.run_logger import RunLogger
from instar.run.output.save import Saver
from instar.run.state.data_phase import DataPhase, LoaderFactory
from instar.run.state.early_stopping import MetricTracker
from instar.run.state.sync_point import SyncPoint
from instar.run.step.hooks import Hooks
from instar.run.step.stepper import Stepper
from instar.schedule.operations import State
from instar.schedule.triggers import Entry
from instar.tasks.task import Task


@dataclass
class Components:
    """Components of a run, passed to functions together with its state.

    Growth replaces the stepper, `read` the loader.
    """

    config: RunConfig
    world: World
    initial: State
    """settings and architecture at step 0"""
    entries: tuple[Entry, ...]
    """entries of the schedule, in order"""
    budgets: Sequence[Budget]
    stepper: Stepper
    loaders: LoaderFactory
    sync: SyncPoint
    saver: Saver
    extensions: Sequence[RunExtension]
    logger: RunLogger
    rank_log: RankLog
    tracker: MetricTracker
    text_sampler: TextSampler
    weight_analyzer: WeightAnalyzer
    hooks: Hooks
    line: Sequence[RunStart] = ()
    """starts of the run that led to this process, the current one last"""
    validation: Source = field(init=False)
    eval_sets: Mapping[str, Source] = field(init=False)
    """further held-out splits, by name"""
    loader: Prefetcher | None = None
    waiting_written: object = None
    """of which state what waits was written last, on rank 0"""

    @property
    def task(self) -> Task:
        """The task in its current shape."""
        return self.stepper.task

    def read(self, phase: DataPhase) -> None:
        """Open the loader of a data phase and the validation split. A collective.

        The task must already have samples of the phase's length.
        """
        # all messages of one loader must be received before the next one sends
        self.close(self.config.parallel.timeout_s)
        self.loader = self.loaders.open(self.task, phase)
        self.validation = self.task.held_out("val")
        self.eval_sets = {name: self.task.held_out(name) for name in self.task.held_out_sets}
        self.logger.epochs = phase.epochs

    def close(self, limit_s: float = 0.2) -> None:
        """Stop reading; wait at most `limit_s` seconds for a read in progress."""
        if self.loader is not None:
            self.loader.close(limit_s)
