"""A search for a schedule of growth: its candidates, the trials that compare them, and its file.

A candidate begins with a smaller shape and ends with the final one. All trials of a rung spend the FLOPs
of the same number of steps of the final size, and end with their rate decayed. The better half of a
rung goes on to the next, with twice the FLOPs (successive halving, arXiv 1502.07943); the final size from scratch is
in each. Moments of growth are shares of the run, so each rung has its own.

The file is JSON of `Search`, read as data from anywhere, like a pilot's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import msgspec

from instar.config.origins import in_yaml
from instar.models.architecture import AXES, Architecture
from instar.schedule.pilot import (
    MOST,
    Amount,
    Loss,
    Pilot,
    PilotCase,
    PilotModel,
    PilotRun,
    Positive,
    Seed,
    Spent,
    Step,
    Steps,
    Text,
    read_json,
)

SUFFIX = ".search.json"
SCRATCH = "scratch"
"""The candidate that does not grow."""
RUNGS = (4, 2, 1)
"""The horizon is divided by these."""
_FACTORS = (4, 3, 2)
"""Of layers; 8 is beyond what copies make up for."""
_MOMENTS = (0.6, 0.75, 0.9)
"""Of the steps before the rate decays."""
_TWICE = (0.45, 0.9)
_REWARM = 0.05
"""Share of the steps over which the rate of new parameters rises."""

Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,50}\Z")]


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A size on the way to the final one."""

    share: Share
    """Of the steps, before it begins."""
    flops_per_token: Positive
    operations: tuple[dict[Text, Any], ...] = ()
    """That make it of the size before."""


class Candidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schedule that leads to the final shape."""

    name: Name
    trunk: Name
    """Of the run that all schedules share which begin with this shape."""
    begin: dict[Text, Any]
    """Keys of the config that give the first shape in place of the final one."""
    parameters: Steps
    """Of the first shape."""
    stages: Annotated[tuple[Stage, ...], msgspec.Meta(min_length=1, max_length=MOST)]
    rewarm: Share = 0.0
    """Share of the steps over which the rate of new parameters rises."""

    def steps(self, final_steps: int) -> int:
        """Return the steps with the FLOPs of so many of the final size."""
        spent = final_steps * self.stages[-1].flops_per_token
        shares = [*(stage.share for stage in self.stages), 1.0]
        costs = (stage.flops_per_token for stage in self.stages)
        mean = sum(c * (end - at) for c, (at, end) in zip(costs, pairwise(shares), strict=True))
        near = round(spent / mean)
        return min(range(max(near - 2, 1), near + 3), key=lambda n: abs(self.flops(n) - spent))

    def moments(self, steps: int) -> tuple[int, ...]:
        """Return the step of each growth in a run of so many."""
        return tuple(math.ceil(stage.share * steps - 1e-9) for stage in self.stages[1:])

    def spent(self, steps: int, tokens_per_step: float = 1.0) -> tuple[Spent, ...]:
        """Return what a run of so many steps spends."""
        ends = pairwise((0, *self.moments(steps), steps))
        return tuple(
            Spent(stage.flops_per_token, (end - begin) * tokens_per_step)
            for stage, (begin, end) in zip(self.stages, ends, strict=True)
        )

    def flops(self, steps: int) -> float:
        """Return the FLOPs of a run of so many steps of one token."""
        return sum(each.flops_per_token * each.tokens for each in self.spent(steps))

    def branches_at(self, steps: int, decay: float) -> int:
        """Return the step at which a run of so many leaves its trunk."""
        return self.moments(steps)[0] if len(self.stages) > 1 else steps - round(decay * steps)

    def entries(self, steps: int, *, shares: bool = False) -> list[dict[str, Any]]:
        """Return the schedule of a run of so many steps, with its growth at steps or at shares of it."""
        found = []
        for stage, step in zip(self.stages[1:], self.moments(steps), strict=True):
            when = {"at_fraction": stage.share} if shares else {"at_step": step}
            lr = {"lr": {"rewarm_new": max(2, round(self.rewarm * steps))}} if self.rewarm else {}
            found += [{**each, **lr, "when": when} for each in stage.operations]
        return found

    @property
    def growth(self) -> tuple[str, ...]:
        """Its operations as text."""
        found = (each for stage in self.stages for each in stage.operations)
        return tuple(
            " ".join([each["name"], *(in_yaml(v) for k, v in each.items() if k != "name")])
            for each in found
        )


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of a candidate that has ended."""

    candidate: Name
    rung: Annotated[int, msgspec.Meta(ge=0, lt=len(RUNGS))]
    seed: Seed
    steps: Steps
    loss: Loss | None
    """Held-out loss of its last step, nats; None: not finite."""
    evaluations: Annotated[
        tuple[tuple[Step, Amount, Loss], ...], msgspec.Meta(max_length=MOST)
    ] = ()
    """Steps, tokens and held-out loss, its trunk's before."""


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A search, planned and done."""

    name: Text
    """The config's."""
    settings: dict[Text, Any]
    """The values of the config on which losses depend, by dotted key."""
    candidates: Annotated[tuple[Candidate, ...], msgspec.Meta(min_length=2, max_length=MOST)]
    """The first is the final size from scratch."""
    seeds: Annotated[tuple[Seed, ...], msgspec.Meta(min_length=1, max_length=MOST)]
    rungs: Annotated[tuple[Steps, ...], msgspec.Meta(min_length=3, max_length=3)]
    """Steps of the final size from scratch; the last is the horizon."""
    run_steps: Steps
    """Of the config's run."""
    decay: Share
    """The last share of the steps, in which the rate falls."""
    tokens_per_step: Positive
    evaluations: Steps
    """Of a run as long as the horizon."""
    seconds: Annotated[
        tuple[tuple[Positive, Positive], ...], msgspec.Meta(min_length=2, max_length=2)
    ]
    """FLOPs per token and seconds of a step of the smallest and of the final size."""
    trials: Annotated[tuple[Trial, ...], msgspec.Meta(max_length=MOST)] = ()
    found: dict[str, Any] = {}
    """The results, for readers of the file."""
    version: Literal[1] = 1

    @property
    def scratch(self) -> Candidate:
        """The final size from scratch."""
        return self.candidates[0]

    def loss(self, candidate: Candidate, rung: int) -> float | None:
        """Return the mean loss of a candidate's trials of a rung, infinite if one is not finite; None: trials
        are missing."""
        done = {
            t.seed: t.loss for t in self.trials if (t.candidate, t.rung) == (candidate.name, rung)
        }
        if any(seed not in done for seed in self.seeds):
            return None
        return fmean(math.inf if (loss := done[seed]) is None else loss for seed in self.seeds)

    def branch(self, candidate: Candidate, rung: int) -> dict[str, Any]:
        """Return the branch of a trunk that is a trial, as an entry of its schedule."""
        steps = candidate.steps(self.rungs[rung])
        at = candidate.branches_at(steps, self.decay)
        return {
            "name": "branch",
            "value": f"{candidate.name}-{steps}it",
            "when": {"at_step": at},
            "iters": steps - at,
            "decay": round(self.decay * steps),
            "train": False,
            "schedule": candidate.entries(steps),
        }

    @property
    def count(self) -> int:
        """The number of trials in all."""
        first = len(self.candidates) - 1
        return len(self.seeds) * sum(1 - (-first // (1 << n)) for n in range(len(self.rungs)))

    def losses(self, candidate: Candidate) -> list[float | None]:
        """Return the mean loss of a candidate in each rung."""
        return [self.loss(candidate, rung) for rung in range(len(self.rungs))]

    def alive(self, rung: int) -> tuple[Candidate, ...] | None:
        """Return the schedules of a rung, the best of the rung before first; None: it has not ended."""
        before = self.candidates[1:] if not rung else self.alive(rung - 1)
        if not rung or before is None:
            return before
        losses = {each.name: self.loss(each, rung - 1) for each in before}
        if any(loss is None for loss in losses.values()):
            return None
        ranked = sorted(before, key=lambda each: losses[each.name] or 0.0)
        return tuple(ranked[: -(-len(ranked) // 2)])

    def planned(self, rung: int) -> Iterator[tuple[Candidate, int]]:
        """Yield the trials of a rung that has begun, with their seeds."""
        for candidate in (self.scratch, *(self.alive(rung) or ())):
            for seed in self.seeds:
                yield candidate, seed

    @property
    def missing(self) -> tuple[Candidate, int, int] | None:
        """The next trial: candidate, rung and seed; None: the search is complete."""
        done = {(trial.candidate, trial.rung, trial.seed) for trial in self.trials}
        for rung in range(len(self.rungs)):
            for candidate, seed in self.planned(rung):
                if (candidate.name, rung, seed) not in done:
                    return candidate, rung, seed
        return None

    @property
    def winner(self) -> Candidate | None:
        """The schedule with the lowest loss at the horizon; None if that of the final size from scratch is as
        low. Of a search that is complete."""
        last = len(self.rungs) - 1
        ranked = sorted(self.alive(last) or (), key=lambda each: self.loss(each, last) or 0.0)
        losses = [self.loss(each, last) or 0.0 for each in (*ranked[:1], self.scratch)]
        return ranked[0] if losses[0] < losses[-1] else None

    def step_seconds(self, flops_per_token: float) -> float:
        """Return the time of a step, linear in its FLOPs between the two sizes that were measured."""
        (small, fast), (final, slow) = self.seconds
        share = (flops_per_token - small) / (final - small) if final > small else 1.0
        return max(fast + share * (slow - fast), 1e-9)

    def work(self, cost: Callable[[float], float]) -> tuple[float, int]:
        """Return the cost of all runs, if the most expensive schedules go on, and the number of runs.

        Args:
            cost: of a step, by FLOPs per token.
        """
        total, count, alive, trunks = 0.0, 0, len(self.candidates) - 1, dict[str, float]()
        for final_steps in self.rungs:
            own = []
            for each in self.candidates:
                steps = each.steps(final_steps)
                first = cost(each.stages[0].flops_per_token)
                shared = each.branches_at(steps, self.decay) * first
                whole = sum(s.tokens * cost(s.flops_per_token) for s in each.spent(steps))
                own.append(whole - shared)
                trunks[each.trunk] = max(trunks.get(each.trunk, 0.0), shared)
            total += own[0] + sum(sorted(own[1:])[-alive:])
            count, alive = count + 1 + alive, -(-alive // 2)
        seeds = len(self.seeds)
        return seeds * (total + sum(trunks.values())), seeds * (count + len(trunks))

    def pilot(
        self,
        winner: Candidate,
        settings: Mapping[str, Any],
        trunks: Mapping[int, tuple[tuple[int, float, float], ...]],
    ) -> Pilot:
        """Return the trials of the winner as a pilot: of the final size, of the winner, and of its trunk.

        Args:
            settings: of the run with the winner's schedule.
            trunks: the evaluations of its trunks, by seed.
        """
        runs = [
            self._run(trial, winner) for trial in self.trials if self._is_of_pilot(trial, winner)
        ]
        small = winner.stages[0].flops_per_token
        for seed, evaluations in trunks.items():
            step, tokens, loss = evaluations[-1]
            case = PilotCase("small", seed, step)
            runs.append(PilotRun(case, loss, (Spent(small, tokens),), evaluations))
        sizes = (winner, small), (self.scratch, self.scratch.stages[-1].flops_per_token)
        first, final = (PilotModel(c.parameters, f, self.step_seconds(f)) for c, f in sizes)
        return Pilot(
            name=self.name,
            settings=dict(settings),
            growth=winner.growth,
            run_steps=self.run_steps,
            stable_share=1 - self.decay,
            tokens_per_step=self.tokens_per_step,
            evaluations=self.evaluations,
            small=first,
            final=final,
            cases=tuple(run.case for run in runs),
            runs=tuple(runs),
        )

    def _is_of_pilot(self, trial: Trial, winner: Candidate) -> bool:
        last = trial.candidate == winner.name and trial.rung == len(self.rungs) - 1
        return trial.loss is not None and (last or trial.candidate == SCRATCH)

    def _run(self, trial: Trial, winner: Candidate) -> PilotRun:
        assert trial.loss is not None
        if trial.candidate == SCRATCH:
            case, candidate = PilotCase("final", trial.seed, trial.steps), self.scratch
        else:
            moments = winner.moments(trial.steps)
            case, candidate = PilotCase("grown", trial.seed, trial.steps, moments), winner
        spent = candidate.spent(trial.steps, self.tokens_per_step)
        return PilotRun(case, trial.loss, spent, trial.evaluations)


def read_search(path: Path) -> Search:
    """Read a search's file.

    Raises:
        ConfigError: it is missing or no such file; says what is wrong in it.
    """
    return read_json(path, Search, "the file of a search", "instar schedule search CONFIG -o FILE")


class Proposal(msgspec.Struct, frozen=True):
    """A way to the final shape whose costs are not known yet."""

    name: str
    trunk: str
    shape: Architecture
    """The first one."""
    growth: tuple[tuple[float, tuple[dict[str, Any], ...]], ...]
    """Share of the steps, and operations."""
    rewarm: float = 0.0


def proposals(final: Architecture, decay: float) -> Iterator[Proposal]:
    """Yield ways to a shape, in runs whose rate decays over the last share `decay` of their steps: copies of
    all layers at several moments and in two steps, copies between layers, the rate of copies warmed up,
    and half the width."""
    layers, stable = final.n_layer, 1 - decay
    factors = [factor for factor in _FACTORS if layers and layers % factor == 0]

    def deeper(
        sizes: tuple[int, ...], moments: tuple[float, ...], more: str = "", rewarm: float = 0.0
    ) -> Proposal:
        shares = [round(stable * moment, 2) for moment in moments]
        name = "-".join(["L" + "-".join(map(str, sizes)), "at", *(f"{s:.2f}"[2:] for s in shares)])
        operations = [
            {"name": "insert_layers", "value": b - a, "from": "copy", "where": "even"}
            if more == "insert"
            else {"name": "stack_layers", "value": b // a}
            for a, b in pairwise(sizes)
        ]
        return Proposal(
            f"{name}-{more}" if more else name,
            f"L{sizes[0]}",
            final.resized(layers=sizes[0]),
            tuple((share, (one,)) for share, one in zip(shares, operations, strict=True)),
            rewarm,
        )

    for factor in factors:
        for moment in _MOMENTS:
            yield deeper((layers // factor, layers), (moment,))
    if 4 in factors:
        yield deeper((layers // 4, layers // 2, layers), _TWICE)
    for factor in factors[:1]:
        yield deeper((layers // factor, layers), _MOMENTS[1:2], "rewarm", _REWARM)
    if layers > 2:  # a single layer has only copies, which stacking makes too
        yield deeper((layers - layers // 2, layers), _MOMENTS[1:2], "insert")
    halved = ("embed", "heads", "kv_heads", "mlp")
    sizes = [getattr(final, AXES[axis]) for axis in halved]
    if all(size % 2 == 0 for size in sizes):
        share = round(stable * _MOMENTS[1], 2)
        half = {axis: size // 2 for axis, size in zip(halved, sizes, strict=True)}
        shape = final.resized(**half)
        wider = (
            {"name": "widen_hidden", "value": "x2"},
            {"name": "add_heads", "value": final.n_head // 2},
            {"name": "widen_mlp", "value": "x2"},
        )
        trunk = f"W{shape.n_embd}"
        yield Proposal(
            f"{trunk}-{final.n_embd}-at-{f'{share:.2f}'[2:]}", trunk, shape, ((share, wider),)
        )
