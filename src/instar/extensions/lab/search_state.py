"""The state of a search for a schedule of growth: its candidates, the trials that compare them, and its file.

Candidates are schedules that lead to one final shape. All trials of a rung spend the FLOPs of the same number
of steps of the final size, and end with their rate decayed. The better half of a rung goes on to the next, with
twice the FLOPs; the final size from scratch is in each. Moments of growth are shares of the run, so each rung
has its own.

The file is JSON of `ScheduleSearch`, read as data from anywhere, like a pilot's.
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
from instar.extensions.lab.halving import RUNGS, rung_sizes, survivors
from instar.extensions.lab.pilot_file import (
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
    read_json_as,
)
from instar.models.architecture import AXES, Architecture

SCRATCH = "scratch"
"""The candidate that does not grow."""
_FACTORS = (4, 3, 2)
"""Of layers; 8 is beyond what copies make up for."""
_MOMENTS = (0.6, 0.75, 0.9)
"""Of the steps before the rate decays."""
_TWICE = (0.45, 0.9)
_REWARM = 0.05
"""Share of the steps over which the rate of new parameters rises."""
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,50}\Z")]


class CandidateStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A size on the way to the final one."""

    share: Share
    """Of the steps, before it begins."""
    flops_per_token: Positive
    operations: tuple[dict[Text, Any], ...] = ()
    """That make it of the size before."""


class GrowthCandidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schedule that leads to the final shape."""

    name: Name
    trunk: Name
    """Of the run that all schedules share which begin with this shape."""
    begin: dict[Text, Any]
    """Keys of the config that give the first shape in place of the final one."""
    parameters: Steps
    """Of the first shape."""
    stages: Annotated[tuple[CandidateStage, ...], msgspec.Meta(min_length=1, max_length=MOST)]
    rewarm: Share = 0.0
    """Share of the steps over which the rate of new parameters rises."""

    def steps(self, final_steps: int) -> int:
        """Return the steps with the FLOPs of so many of the final size."""
        total_flops = final_steps * self.stages[-1].flops_per_token
        shares = [*(stage.share for stage in self.stages), 1.0]
        costs = (stage.flops_per_token for stage in self.stages)
        mean = sum(c * (end - at) for c, (at, end) in zip(costs, pairwise(shares), strict=True))
        near = round(total_flops / mean)
        return min(
            range(max(near - 2, 1), near + 3), key=lambda n: abs(self.flops(n) - total_flops)
        )

    def moments(self, steps: int) -> tuple[int, ...]:
        """Return the step of each growth in a run of so many."""
        return tuple(math.ceil(stage.share * steps - 1e-9) for stage in self.stages[1:])

    def costs(self, steps: int, tokens_per_step: float = 1.0) -> tuple[Spent, ...]:
        """Return what a run of so many steps spends."""
        ends = pairwise((0, *self.moments(steps), steps))
        return tuple(
            Spent(stage.flops_per_token, (end - begin) * tokens_per_step)
            for stage, (begin, end) in zip(self.stages, ends, strict=True)
        )

    def flops(self, steps: int) -> float:
        """Return the FLOPs of a run of so many steps of one token."""
        return sum(stage.flops_per_token * stage.tokens for stage in self.costs(steps))

    def branches_at(self, steps: int, decay: float) -> int:
        """Return the step at which a run of so many leaves its trunk."""
        return self.moments(steps)[0] if len(self.stages) > 1 else steps - round(decay * steps)

    def entries(self, steps: int, *, shares: bool = False) -> list[dict[str, Any]]:
        """Return the schedule of a run of so many steps, with its growth at steps or at shares of it."""
        entries = []
        for stage, step in zip(self.stages[1:], self.moments(steps), strict=True):
            when = {"at_fraction": stage.share} if shares else {"at_step": step}
            lr = {"lr": {"rewarm_new": max(2, round(self.rewarm * steps))}} if self.rewarm else {}
            entries += [{**operation, **lr, "when": when} for operation in stage.operations]
        return entries

    @property
    def growth(self) -> tuple[str, ...]:
        """Its operations as text."""
        operations = (operation for stage in self.stages for operation in stage.operations)
        return tuple(
            " ".join(
                [operation["name"], *(in_yaml(v) for k, v in operation.items() if k != "name")]
            )
            for operation in operations
        )


class GrowthProposal(msgspec.Struct, frozen=True):
    """A way to the final shape whose costs are not known yet."""

    name: str
    trunk: str
    shape: Architecture
    """The first one."""
    growth: tuple[tuple[float, tuple[dict[str, Any], ...]], ...]
    """Share of the steps, and operations."""
    rewarm: float = 0.0


def proposals(final: Architecture, decay: float) -> Iterator[GrowthProposal]:
    """Yield ways to a shape, in runs whose rate decays over the last share `decay` of their steps: copies of
    all layers at several moments and in two steps, copies between layers, the rate of copies warmed up,
    and half the width."""
    layers, stable = final.n_layer, 1 - decay
    factors = [factor for factor in _FACTORS if layers and layers % factor == 0]

    def deeper(
        sizes: tuple[int, ...], moments: tuple[float, ...], more: str = "", rewarm: float = 0.0
    ) -> GrowthProposal:
        shares = [round(stable * moment, 2) for moment in moments]
        name = "-".join(["L" + "-".join(map(str, sizes)), "at", *(f"{s:.2f}"[2:] for s in shares)])
        operations = [
            {"name": "insert_layers", "value": b - a, "from": "copy", "where": "even"}
            if more == "insert"
            else {"name": "stack_layers", "value": b // a}
            for a, b in pairwise(sizes)
        ]
        return GrowthProposal(
            f"{name}-{more}" if more else name,
            f"L{sizes[0]}",
            final.resized(layers=sizes[0]),
            tuple(
                (share, (operation,)) for share, operation in zip(shares, operations, strict=True)
            ),
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
    axes_to_halve = ("embed", "heads", "kv_heads", "mlp")
    sizes = [getattr(final, AXES[axis]) for axis in axes_to_halve]
    if all(size % 2 == 0 for size in sizes):
        share = round(stable * _MOMENTS[1], 2)
        half = {axis: size // 2 for axis, size in zip(axes_to_halve, sizes, strict=True)}
        shape = final.resized(**half)
        wider = (
            {"name": "widen_hidden", "value": "x2"},
            {"name": "add_heads", "value": final.n_head // 2},
            {"name": "widen_mlp", "value": "x2"},
        )
        trunk = f"W{shape.n_embd}"
        yield GrowthProposal(
            f"{trunk}-{final.n_embd}-at-{f'{share:.2f}'[2:]}", trunk, shape, ((share, wider),)
        )


SUFFIX = ".search.json"


class SearchTrial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


class ScheduleSearch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A search, planned and done."""

    name: Text
    """The config's."""
    settings: dict[Text, Any]
    """The values of the config on which losses depend, by dotted key."""
    candidates: Annotated[tuple[GrowthCandidate, ...], msgspec.Meta(min_length=2, max_length=MOST)]
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
    trials: Annotated[tuple[SearchTrial, ...], msgspec.Meta(max_length=MOST)] = ()
    version: Literal[1] = 1

    @property
    def scratch(self) -> GrowthCandidate:
        """The final size from scratch."""
        return self.candidates[0]

    def loss(self, candidate: GrowthCandidate, rung: int) -> float | None:
        """Return the mean loss of a candidate's trials of a rung, infinite if one is not finite; None: trials
        are missing."""
        losses = {
            t.seed: t.loss for t in self.trials if (t.candidate, t.rung) == (candidate.name, rung)
        }
        if any(seed not in losses for seed in self.seeds):
            return None
        return fmean(math.inf if (loss := losses[seed]) is None else loss for seed in self.seeds)

    def branch(self, candidate: GrowthCandidate, rung: int) -> dict[str, Any]:
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
        sizes = rung_sizes(len(self.candidates) - 1)
        return len(self.seeds) * sum(1 + size for size in sizes)

    def losses(self, candidate: GrowthCandidate) -> list[float | None]:
        """Return the mean loss of a candidate in each rung."""
        return [self.loss(candidate, rung) for rung in range(len(self.rungs))]

    def alive(self, rung: int) -> tuple[GrowthCandidate, ...] | None:
        """Return the schedules of a rung, the best of the rung before first; None: it has not ended."""
        before = self.candidates[1:] if not rung else self.alive(rung - 1)
        if not rung or before is None:
            return before
        losses = [self.loss(candidate, rung - 1) for candidate in before]
        by_number = {n: loss for n, loss in enumerate(losses) if loss is not None}
        if len(by_number) < len(before):
            return None
        size = rung_sizes(len(self.candidates) - 1)[rung]
        return tuple(before[n] for n in survivors(by_number, size))

    def planned_trials(self, rung: int) -> Iterator[tuple[GrowthCandidate, int]]:
        """Yield the trials of a rung that has begun, with their seeds."""
        for candidate in (self.scratch, *(self.alive(rung) or ())):
            for seed in self.seeds:
                yield candidate, seed

    @property
    def missing(self) -> tuple[GrowthCandidate, int, int] | None:
        """The next trial: candidate, rung and seed; None: the search is complete."""
        finished_trials = {(trial.candidate, trial.rung, trial.seed) for trial in self.trials}
        for rung in range(len(self.rungs)):
            for candidate, seed in self.planned_trials(rung):
                if (candidate.name, rung, seed) not in finished_trials:
                    return candidate, rung, seed
        return None

    @property
    def winner(self) -> GrowthCandidate | None:
        """The schedule with the lowest loss at the horizon; None if that of the final size from scratch is as
        low. Of a search that is complete."""
        last = len(self.rungs) - 1
        finalists = self.alive(last) or ()
        losses = {n: self.loss(candidate, last) or 0.0 for n, candidate in enumerate(finalists)}
        for best in survivors(losses, 1):
            if losses[best] < (self.loss(self.scratch, last) or 0.0):
                return finalists[best]
        return None

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
        total, count, trunks = 0.0, 0, dict[str, float]()
        sizes = rung_sizes(len(self.candidates) - 1)
        for final_steps, size in zip(self.rungs, sizes, strict=True):
            work = []
            for candidate in self.candidates:
                steps = candidate.steps(final_steps)
                first = cost(candidate.stages[0].flops_per_token)
                shared = candidate.branches_at(steps, self.decay) * first
                candidate_cost = sum(
                    s.tokens * cost(s.flops_per_token) for s in candidate.costs(steps)
                )
                work.append(candidate_cost - shared)
                trunks[candidate.trunk] = max(trunks.get(candidate.trunk, 0.0), shared)
            total += work[0] + sum(sorted(work[1:])[-size:])
            count += 1 + size
        seeds = len(self.seeds)
        return seeds * (total + sum(trunks.values())), seeds * (count + len(trunks))

    def pilot(
        self,
        winner: GrowthCandidate,
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

    def _is_of_pilot(self, trial: SearchTrial, winner: GrowthCandidate) -> bool:
        last = trial.candidate == winner.name and trial.rung == len(self.rungs) - 1
        return trial.loss is not None and (last or trial.candidate == SCRATCH)

    def _run(self, trial: SearchTrial, winner: GrowthCandidate) -> PilotRun:
        assert trial.loss is not None
        if trial.candidate == SCRATCH:
            case, candidate = PilotCase("final", trial.seed, trial.steps), self.scratch
        else:
            moments = winner.moments(trial.steps)
            case, candidate = PilotCase("grown", trial.seed, trial.steps, moments), winner
        costs = candidate.costs(trial.steps, self.tokens_per_step)
        return PilotRun(case, trial.loss, costs, trial.evaluations)


def read_search(path: Path) -> ScheduleSearch:
    """Read a search's file.

    Raises:
        ConfigError: it is missing or no such file; says what is wrong in it.
    """
    return read_json_as(
        path, ScheduleSearch, "the file of a search", "instar schedule search CONFIG -o FILE"
    )
