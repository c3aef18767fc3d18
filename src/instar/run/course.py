"""Which samples come next: a run's way through its data, while their length may change.

Samples are windows of so many tokens. When the length changes there are other samples, in another
order; a *course* is a stretch of the run in which it stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from instar.config.schema import RunConfig
from instar.data.feed import Feed, StepPlan, plan_step
from instar.distributed.world import World
from instar.tasks.task import Task


@dataclass(frozen=True)
class Course:
    """Samples of one length, from the `since`-th sample of the run on."""

    context: int
    samples_per_epoch: int
    number: int = 0
    since: int = 0
    epochs_before: float = 0.0

    def next(self, task: Task, context: int, cursor: int) -> Course:
        """The course that begins where this one is left; `task` has its samples."""
        number = self.number + 1
        return Course(context, _per_epoch(task, number), number, cursor, self.epochs(cursor))

    def epochs(self, cursor: int) -> float:
        """Passes through the data, since the run began."""
        return self.epochs_before + (cursor - self.since) / self.samples_per_epoch

    def plan(self, cursor: int, global_batch: int) -> StepPlan:
        """The step at a cursor; the plan's own counts from the beginning of the course."""
        return plan_step(cursor - self.since, self.samples_per_epoch, global_batch)


def first_course(task: Task, context: int) -> Course:
    """The course in which a run begins."""
    return Course(context, _per_epoch(task, 0))


def _per_epoch(task: Task, number: int) -> int:
    return task.train_samples(number)[1].samples_per_epoch


def open_feed(config: RunConfig, world: World, task: Task, course: Course) -> Feed:
    """This rank's feed of the task's training samples, in the course's order; to be closed."""
    source, order = task.train_samples(course.number)
    elastic = config.reproducible == "elastic"
    return Feed(
        source,
        order,
        world.rank,
        world.size,
        prefetch=config.data.prefetch,
        virtual_ranks=config.distributed.elastic.virtual_ranks if elastic else None,
    )
