"""What the runs of `growth.py` say: cases against bars, and the table for a page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from curves import Interval, Point, fitted, interval, needed
from report import Case, case
from segments import Result
from study import Arm

ARMS = {
    "scratch": "final size from scratch",
    "fixed": "best size that does not grow",
    "rewarmed": "final size, rate warmed up again",
    "fresh": "grown, new layers drawn, moments reset",
    "reset": "grown, moments reset",
    "mapped": "grown, moments mapped",
    "asymmetric": "grown, copies without first moments",
}
AIM = 0.65
"""of the final size's compute: 35 % saved"""

Found = Mapping[Arm, Sequence[Result]]


def cases(found: Found) -> list[Case]:
    """Compute to the target for each arm, as a multiple of the final size's, and how sure it is."""
    reference = _curves(found, "scratch")
    targets = [fitted(seed).loss(max(point.flops for point in seed)) for seed in reference]
    made = [case("target", targets, "nats")]
    for name, words in ARMS.items():
        ratios = _ratios(found, name)
        if name == "scratch" or not ratios:
            continue
        between = interval(ratios)
        aimed = name == "asymmetric"
        made += [
            case(f"compute of: {words}", ratios, "ratio", most=AIM if aimed else None),
            case(f"compute of: {words}, at least", [between.low], "ratio"),
            case(
                f"compute of: {words}, at most",
                [between.high],
                "ratio",
                most=1.0 if aimed else None,
            ),
        ]
    if chance := _by_chance(reference):
        made += [
            case("compute of: the final size with other seeds, at least", [chance.low], "ratio"),
            case("compute of: the final size with other seeds, at most", [chance.high], "ratio"),
        ]
    return made


def table(found: Found) -> str:
    """One row for each arm, in Markdown: compute to the target, and what its longest runs were."""
    rows = [
        "| arm | compute to the target | 95 % | loss of the longest | its tokens | its FLOPs | its seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, words in ARMS.items():
        if ratios := _ratios(found, name):
            between = interval(ratios)
            longest = [max(runs, key=lambda run: run.flops) for runs in _runs(found, name)]
            loss, tokens, flops, seconds = (
                statistics.fmean(getattr(run, field) for run in longest)
                for field in ("loss", "tokens", "flops", "active_s")
            )
            rows.append(
                f"| {words} | {between.mean:.3f} | {between.low:.3f} – {between.high:.3f} | {loss:.4f} "
                f"| {tokens / 1e6:.2f} M | {flops:.2e} | {seconds:,.0f} |"
            )
    return "\n".join(rows)


def _runs(found: Found, name: str) -> list[Sequence[Result]]:
    """Of one arm, the decayed runs of each seed, in the order of the seeds."""
    return [found[arm] for arm in sorted(found, key=lambda arm: arm.seed) if arm.name == name]


def _curves(found: Found, name: str) -> list[list[Point]]:
    return [[Point(run.flops, run.loss) for run in runs] for runs in _runs(found, name)]


def _ratios(found: Found, name: str) -> list[float]:
    pairs = zip(_curves(found, name), _curves(found, "scratch"), strict=False)
    return [needed(arm, reference) for arm, reference in pairs]


def _by_chance(reference: Sequence[Sequence[Point]]) -> Interval | None:
    """Each seed's final size against the next one's: how much another seed alone seems to save."""
    if len(reference) < 2:
        return None
    others = [*reference[1:], reference[0]]
    return interval([needed(one, other) for one, other in zip(reference, others, strict=True)])
