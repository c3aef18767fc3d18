"""What the runs of `growth.py` say: cases against bars, and tables for a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from columns import Column
from curves import Interval, Point, fitted, interval, needed
from report import Case, case
from segments import Result
from study import Run

Results = Mapping[str, Mapping[Run, Result]]
"""By arm or part of the trials."""


@dataclass(frozen=True)
class Found:
    """What is known of a column."""

    column: Column
    trials: Results
    seeds: Sequence[Results]

    def points(self, arm: str) -> list[list[Point]]:
        """Of each seed, the budgets."""
        return [[Point(run.flops, run.loss) for run in seed[arm].values()] for seed in self.seeds]

    def ratios(self, arm: str) -> list[float]:
        """FLOPs to the loss of the final size, as a share of its own, of each seed."""
        pairs = zip(self.points(arm), self.points("scratch"), strict=True)
        return [needed(points, reference) for points, reference in pairs]

    def chance(self) -> Interval | None:
        """Each seed's final size against the next one's: how much another seed alone seems to save."""
        reference = self.points("scratch")
        if len(reference) < 2:
            return None
        others = [*reference[1:], reference[0]]
        return interval([needed(one, other) for one, other in zip(reference, others, strict=True)])

    def estimate(self, result: Result) -> float:
        """The ratio of a trial, by one budget and the slope of the final size."""
        slope = statistics.fmean(fitted(points).slope for points in self.points("scratch"))
        best = min(self.trials["scratch"].values(), key=lambda each: each.loss)
        return result.flops / best.flops * math.exp((best.loss - result.loss) / slope)


def cases(found: Found) -> list[Case]:
    """Compute to the target for each arm, as a multiple of the final size's, and how sure it is."""
    column, name = found.column, found.column.name
    targets = [
        max(points, key=lambda point: point.flops).loss for points in found.points("scratch")
    ]
    made = [case(f"{name}: target", targets, "nats")]
    if column.fixed:
        best = min(found.estimate(tried) for tried in found.trials["fixed"].values())
        made.append(case(f"{name}: best size that does not grow, trial seed", [best], "ratio"))
    for arm in found.seeds[0]:
        if arm == "scratch":
            continue
        between = interval(found.ratios(arm))
        bar, clear = column.bars.get(arm, (None, None))
        made += [
            case(f"{name}: {arm}, compute", [between.mean], "ratio", most=bar),
            case(f"{name}: {arm}, at least", [between.low], "ratio"),
            case(f"{name}: {arm}, at most", [between.high], "ratio", most=clear),
        ]
    for more, less, what in (
        ("ramped", "grown", "ramps on top of growth"),
        ("together", "ramped", "a ramp of the batch on top of one of the context"),
    ):
        if more in found.seeds[0]:
            pairs = zip(found.ratios(more), found.ratios(less), strict=True)
            worth = interval([both / alone for both, alone in pairs])
            made += [
                case(f"{name}: {what}, compute", [worth.mean], "ratio"),
                case(f"{name}: {what}, at least", [worth.low], "ratio"),
                case(f"{name}: {what}, at most", [worth.high], "ratio"),
            ]
    if chance := found.chance():
        made += [
            case(f"{name}: final size with other seeds, at least", [chance.low], "ratio"),
            case(f"{name}: final size with other seeds, at most", [chance.high], "ratio"),
        ]
    return made


def table(found: Found) -> str:
    """The trials of a column and its arms, in Markdown."""
    rows = [
        f"**{found.column.name}**, {len(found.seeds)} seeds",
        "",
        "| arm | compute to the target | 95 % | each seed |",
        "| --- | --- | --- | --- |",
    ]
    for arm in found.seeds[0]:
        ratios = found.ratios(arm)
        between = interval(ratios)
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        rows.append(
            f"| {arm} | {between.mean:.3f} | {between.low:.3f} to {between.high:.3f} | {each} |"
        )
    rows += ["", "| trial | FLOPs | loss | compute, estimated |", "| --- | --- | --- | --- |"]
    for tried in found.trials.values():
        for run, result in sorted(tried.items(), key=lambda item: item[1].loss):
            share = result.flops / found.column.flops
            rows.append(
                f"| `{run.arm}` | {share:.2f} | {result.loss:.4f} | {found.estimate(result):.2f} |"
            )
    return "\n".join(rows)
