"""The engine `local`: instances run on this machine, next to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from instar.fleet.engines.work import Work, events_before
from instar.fleet.placement import close_all, lock_gpus

if TYPE_CHECKING:
    from instar.fleet.search.trials import Trials


def run(work: Work, say: Callable[[str], None], *, wait: bool) -> int:
    """Run what there is to do; see `start.run`.

    Raises:
        Taken: too few GPUs are free, and they are not waited for.
    """
    plan = work.plan
    if plan.uses_gpus and not wait:
        # refuse before anything is started if another fleet holds what this one needs
        count = sum(len(each) for each in plan.slot(0).gpus.values())
        needed = count * min(plan.parallel, len(work.todo))
        close_all(each for _, each in lock_gpus(work.gpus, needed, (), "a check"))
    say(f"fleet {work.started.path.name}: {len(work.todo)} instances, {plan.parallel} at a time")
    return work.launcher(say, wait_for_gpus=wait, trials=_trials(work, say)).run(
        work.todo, work.before
    )


def _trials(work: Work, say: Callable[[str], None]) -> Trials | None:
    search = work.plan.spec.search
    if search is None:
        return None
    from instar.fleet.search.trials import Trials

    todo = {each.index for each in work.todo}
    events = events_before(work.started)
    return Trials(search, work.started.path, work.plan.instances, events, todo, say)
