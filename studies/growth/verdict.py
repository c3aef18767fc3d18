"""What the runs of `growth.py` say: cases against bars, and tables for a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from columns import FIRST, GROWN, SCRATCH, Column
from curves import Interval, Point, fit_curve, interval, needed_compute
from report import Case, case
from segments import Result
from study import Arm, Run


@dataclass(frozen=True)
class Outcome:
    """What is known of a column."""

    column: Column
    trials: Mapping[str, Mapping[Arm, Sequence[Result]]]
    """of each way: what was tried, with one result for each seed of the trials"""
    seeds: Sequence[Mapping[str, Mapping[Run, Result]]]
    """of each seed, by way"""

    def points(self, way: str) -> list[list[Point]]:
        """Of each seed, the budgets."""
        return [[Point(run.flops, run.loss) for run in seed[way].values()] for seed in self.seeds]

    def ratios(self, way: str, reference: str = SCRATCH) -> list[float]:
        """FLOPs to the loss of the reference, as a share of its own, of each seed."""
        pairs = zip(self.points(way), self.points(reference), strict=True)
        return [needed_compute(points, other_points) for points, other_points in pairs]

    def chance(self) -> Interval | None:
        """Each seed's final size against the next one's: how much another seed alone seems to save."""
        reference = self.points(SCRATCH)
        if len(reference) < 2:
            return None
        next_points = [*reference[1:], reference[0]]
        return interval(
            [
                needed_compute(points, other)
                for points, other in zip(reference, next_points, strict=True)
            ]
        )

    def estimate(self, results: Sequence[Result]) -> float:
        """The ratio of a trial, by one budget and the slope of the final size."""
        slope = statistics.fmean(fit_curve(points).slope for points in self.points(SCRATCH))
        best = min(self.trials[SCRATCH].values(), key=mean_loss)
        share = results[0].flops / best[0].flops
        return share * math.exp((mean_loss(best) - mean_loss(results)) / slope)


def mean_loss(results: Sequence[Result]) -> float:
    """Over the seeds of a trial."""
    return statistics.fmean(result.loss for result in results)


def cases(outcome: Outcome) -> list[Case]:
    """Compute to the target, as a multiple of the final size's, and how sure it is."""
    column, name = outcome.column, outcome.column.name
    targets = [
        max(points, key=lambda point: point.flops).loss for points in outcome.points(SCRATCH)
    ]
    grown_interval = interval(outcome.ratios(GROWN))
    case_list = [
        case(f"{name}: target", targets, "nats"),
        case(f"{name}: grown, compute", [grown_interval.mean], "ratio", most=column.goal),
        case(f"{name}: grown, at least", [grown_interval.low], "ratio"),
        case(f"{name}: grown, at most", [grown_interval.high], "ratio"),
    ]
    for way, what in ((SCRATCH, "re-tuned final size"), (GROWN, "grown")):
        against = interval(outcome.ratios(way, FIRST))
        case_list += [
            case(f"{name}: {what} against the first edition's, compute", [against.mean], "ratio"),
            case(f"{name}: {what} against the first edition's, at least", [against.low], "ratio"),
            case(f"{name}: {what} against the first edition's, at most", [against.high], "ratio"),
        ]
    if chance := outcome.chance():
        case_list += [
            case(f"{name}: final size with other seeds, at least", [chance.low], "ratio"),
            case(f"{name}: final size with other seeds, at most", [chance.high], "ratio"),
        ]
    return case_list


def table(outcome: Outcome) -> str:
    """The ways of a column and its trials, in Markdown."""
    rows = [
        f"**{outcome.column.name}**, {len(outcome.seeds)} seeds",
        "",
        "| way | compute to the target | 95 % | each seed |",
        "| --- | --- | --- | --- |",
    ]
    for way, reference in ((GROWN, SCRATCH), (SCRATCH, FIRST), (GROWN, FIRST)):
        ratios = outcome.ratios(way, reference)
        between = interval(ratios)
        per_seed = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        against = f"{way}, to the loss of {reference}"
        rows.append(
            f"| {against} | {between.mean:.3f} | {between.low:.3f} to {between.high:.3f} | {per_seed} |"
        )
    rows += ["", "| trial | FLOPs | loss | compute, estimated |", "| --- | --- | --- | --- |"]
    for trials in outcome.trials.values():
        for arm, results in sorted(trials.items(), key=lambda item: mean_loss(item[1])):
            share = results[0].flops / outcome.column.flops
            rows.append(
                f"| `{arm}` | {share:.2f} | {mean_loss(results):.4f} | {outcome.estimate(results):.2f} |"
            )
    return "\n".join(rows)
