"""The compute that a schedule of growth saves, predicted from a pilot.

A token of a stage that costs c tokens of the final size, in FLOPs, is *worth* c ** θ of them after it has
grown: a run with t_i tokens in stage i ends where the final size from scratch ends after Σ c_i ** θ t_i
tokens, with as much of its rate decayed. Of its compute it saves

    1 - Σ c_i t_i / Σ c_i ** θ t_i.

θ = 0: a token of the small model is worth one of the final size; θ = 1: as much as it costs, so that nothing
is saved. It is measured where the decayed loss of a short grown run lies between those of the final
size from scratch. A token is worth the less, the more tokens t come before the growth, because a small
model saturates, and the more, the more tokens t' come after it, in which the grown model catches up:
the worth of the smallest model's is proportional to t ** b (t' / t) ** m, where b falls with the logarithm
of the tokens per parameter of the small model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from random import Random
from statistics import fmean, linear_regression, median, stdev
from typing import Any

from instar.extensions.lab.pilot_file import Pilot, PilotRun, Spent
from instar.record.format import si
from instar.schedule.curves import PowerLaw, fit_power_law
from instar.schedule.forecast import Forecast

DRAWS = 1000
_EXPONENTS = (-4.0, 12.0)
"""Between them θ is searched."""
_NOISE = 0.01
"""Standard deviation of the decayed losses of a single seed, at least, nats."""
_TREND = (-0.06, -0.12)
"""b at one token per parameter of the small model, and its change where there are e times as many; in the
GPTs of docs/pilot.md."""
_TREND_ERROR = 0.1
"""Standard deviation of b there."""
_MIXING = (0.05, 0.08)
"""m and its standard deviation in these GPTs."""
_MEASURED_ERROR = 0.1
"""Standard deviation of b measured where the tokens are e times as many in the end."""
_LEAST_FALL = 1e-3
"""Nats that the loss falls at least when the tokens are e times as many."""
_BEGIN = 0.1
"""Share of a run before the evaluations that are used: its first steps follow another law."""
_SAME_SHARE = 0.2
"""Distance between shares of the tokens before the growth that counts as near."""
_AHEAD = 1.2
"""γ above which a pilot is in the first steps, in which small models learn faster."""
_FEWEST = 5
"""Evaluations of both models at which a trend is fitted."""


Shares = tuple[float, float, float]
"""Low, middle, high."""


def spending(
    forecast: Forecast, *, late: bool = False, end: int | None = None
) -> tuple[Spent, ...]:
    """Return what a run spends on each stage that it reaches; nothing if its end is not counted.

    Args:
        late: if every operation fires at its latest, in place of its earliest.
        end: a step before its last, at which something else begins.
    """
    totals = forecast.late if late else forecast.early
    if totals is None:
        return ()
    begins = [(s, s.latest_step if late else s.first_step) for s in forecast.stages]
    stages = [
        (stage, begin)
        for stage, begin in begins
        if begin is not None and (end is None or begin < end)
    ]
    ends = [*(begin for _, begin in stages[1:]), totals.steps if end is None else end]
    return tuple(
        Spent(stage.flops_per_token, (end - begin) * stage.settings.global_batch * stage.weight)
        for (stage, begin), end in zip(stages, ends, strict=True)
    )


def worth(costs: Sequence[Spent], exponent: float) -> float:
    """Return the tokens of the last stage's size that all stages are worth."""
    final = costs[-1].flops_per_token
    return sum(math.pow(stage.flops_per_token / final, exponent) * stage.tokens for stage in costs)


def exponent_of(costs: Sequence[Spent], tokens: float) -> float:
    """Return the θ with which the stages are worth `tokens`; the nearest end of its range if none is."""
    low, high = _EXPONENTS
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if worth(costs, middle) > tokens else (low, middle)
    return (low + high) / 2


def before_growth(costs: Sequence[Spent]) -> float:
    """Return the tokens before the last stage's size."""
    return sum(
        stage.tokens for stage in costs if stage.flops_per_token != costs[-1].flops_per_token
    )


@dataclass(frozen=True)
class GrownCase:
    """What one grown run of a pilot came to."""

    run: PilotRun
    equal_tokens: float
    """Tokens after which the final size from scratch has its loss."""
    exponent: float
    """θ"""
    missing: float
    """Loss above that of the final size from scratch after as many tokens, nats."""

    @property
    def token_worth(self) -> float:
        """Final tokens that a token before the growth is worth: γ."""
        final = self.run.spent[-1].tokens
        return (self.equal_tokens - final) / max(before_growth(self.run.spent), 1.0)


class PilotFindings:
    """What the runs of a pilot say.

    Raises ValueError if runs are missing, or one that grows does not grow to the final size.
    """

    def __init__(self, pilot: Pilot) -> None:
        by_seed: dict[int, list[PilotRun]] = {}
        for run in pilot.runs:
            by_seed.setdefault(run.case.seed, []).append(run)
        self.pilot = pilot
        self._seeds = [runs for runs in by_seed.values() if _is_enough(runs)]
        if not self._seeds:
            raise ValueError("runs of the pilot are missing: the command that began it goes on")
        for case in self.grown_cases:
            costs = case.run.spent
            if costs[-1].flops_per_token != pilot.final.flops_per_token or not before_growth(costs):
                raise ValueError(f"its run {case.run.case.name} did not grow to the final size")
        self._at = [
            fmean(logs)
            for logs in zip(*(_logs(g.run.spent) for g in self.grown_cases), strict=True)
        ]

    @cached_property
    def grown_cases(self) -> tuple[GrownCase, ...]:
        """The grown runs, seed by seed."""
        return tuple(run for runs in self._seeds for run in _cases_of(runs))

    @cached_property
    def noise(self) -> float:
        """Standard deviation of a decayed loss, nats: of seeds, or as far as evaluations scatter."""
        by_case: dict[tuple[str, int, tuple[int, ...]], list[float]] = {}
        for run in (run for runs in self._seeds for run in runs):
            case = run.case
            by_case.setdefault((case.arm, case.steps, case.grown_at), []).append(run.loss)
        deviations = [stdev(losses) for losses in by_case.values() if len(losses) > 1]
        scatter = [_scatter(_stable(self.pilot, _longest(runs, "final"))) for runs in self._seeds]
        return fmean(deviations) if deviations else max(_NOISE, fmean(scatter))

    @cached_property
    def trend(self) -> tuple[float, float]:
        """How far b lies above `_usual_trend`, and its standard deviation: the mean of nothing and of what
        the evaluations say, weighted by their variances."""
        trends = [trend for runs in self._seeds if (trend := _trend(self.pilot, runs)) is not None]
        every = [(0.0, _TREND_ERROR), *trends]
        weights = [spread**-2 for _, spread in every]
        mean = sum(w * b for w, (b, _) in zip(weights, every, strict=True)) / sum(weights)
        return mean, sum(weights) ** -0.5

    def b(self, costs: Sequence[Spent]) -> float:
        """Return b between the growth of the pilot and that of a run."""
        middle = (_logs(costs)[0] + self._at[0]) / 2
        return _usual_trend(self.pilot, middle) + self.trend[0]

    def exponents(self, costs: Sequence[Spent]) -> list[float]:
        """Return θ of a run, in `DRAWS` draws: of seeds with replacement, of losses with their noise,
        of b and of m."""
        random, samples, b = Random(0), [], self.b(costs)
        longer, difference = (x - at for x, at in zip(_logs(costs), self._at, strict=True))
        cost = self.pilot.small.flops_per_token / self.pilot.final.flops_per_token
        for _ in range(DRAWS):
            shift = random.gauss(b, self.trend[1]) * longer + random.gauss(*_MIXING) * difference
            seeds = random.choices(self._seeds, k=len(self._seeds))
            noisy = [run for runs in seeds for run in _cases_of(runs, random, self.noise)]
            # the mean of the runs lies at the middle of their logarithms
            slope = shift / math.log(cost) if cost < 1 else 0.0
            samples.append(fmean(run.exponent for run in noisy) + slope)
        return samples

    @cached_property
    def final_curve(self) -> PowerLaw | None:
        """The loss of the final size from scratch by FLOPs, before its rate decays; None: too few
        evaluations."""
        per_token = self.pilot.final.flops_per_token
        points = [
            (tokens * per_token, loss)
            for runs in self._seeds
            for tokens, loss in _stable(self.pilot, _longest(runs, "final"))
        ]
        try:
            return fit_power_law(points)
        except ValueError:
            return None


def pilot_summary(pilot: Pilot) -> dict[str, Any]:
    """Return what the runs of a pilot say, as JSON values; empty while runs are missing."""
    try:
        findings = PilotFindings(pilot)
    except ValueError:
        return {}
    law = findings.final_curve
    thetas = sorted(findings.exponents(findings.grown_cases[0].run.spent))
    return {
        "cost": pilot.small.flops_per_token / pilot.final.flops_per_token,
        "cost_in_seconds": pilot.small.seconds_per_step / pilot.final.seconds_per_step,
        "exponent": median(thetas),
        "exponent_low": thetas[round(0.025 * DRAWS)],
        "exponent_high": thetas[round(0.975 * DRAWS) - 1],
        "trend": findings.b(findings.grown_cases[0].run.spent),
        "trend_error": findings.trend[1],
        "noise": findings.noise,
        "grown": [
            {
                "run": run.run.case.name,
                "tokens_before": before_growth(run.run.spent),
                "token_worth": run.token_worth,
                "exponent": run.exponent,
                "missing_loss": run.missing,
            }
            for run in findings.grown_cases
        ],
        "final_curve": None if law is None else asdict(law),
    }


def _logs(costs: Sequence[Spent]) -> tuple[float, float]:
    """Return the logarithms of the tokens before the last stage's size, and of those of it relative to
    them."""
    before = max(before_growth(costs), 1.0)
    after = sum(s.tokens for s in costs if s.flops_per_token == costs[-1].flops_per_token)
    return math.log(before), math.log(max(after, 1.0) / before)


def _is_enough(runs: Sequence[PilotRun]) -> bool:
    return len({run.case.steps for run in runs if run.case.arm == "final"}) > 1 and any(
        run.case.grown_at for run in runs
    )


def _cases_of(
    runs: Sequence[PilotRun], random: Random | None = None, noise: float = 0.0
) -> list[GrownCase]:
    """Return what the grown runs of a seed came to, with noise on all losses if `random` is given."""
    losses = {run.case: run.loss + (random.gauss(0, noise) if random else 0.0) for run in runs}
    short, long = sorted((run.tokens, losses[run.case]) for run in runs if run.case.arm == "final")[
        -2:
    ]
    # between two budgets the loss falls by about as much with every doubling
    fall = max((short[1] - long[1]) / math.log(long[0] / short[0]), _LEAST_FALL)
    cases = []
    for run in runs:
        if run.case.grown_at:
            loss = losses[run.case]
            equal = long[0] * math.exp((long[1] - loss) / fall)
            missing = loss - long[1] + fall * math.log(run.tokens / long[0])
            cases.append(GrownCase(run, equal, exponent_of(run.spent, equal), missing))
    return cases


def _longest(runs: Sequence[PilotRun], arm: str) -> PilotRun:
    """Return the run of an arm with the most steps, and of these the one that grows last."""
    return max(
        (run for run in runs if run.case.arm == arm),
        key=lambda run: (run.case.steps, run.case.grown_at),
    )


def _stable(pilot: Pilot, run: PilotRun) -> list[tuple[float, float]]:
    """Return (tokens, loss) of the evaluations of a run's first size, after its first steps and before
    its rate decays."""
    end = float(run.case.steps)
    if run.case.arm != "small":
        end *= pilot.stable_share
    if run.case.grown_at:
        end = min(end, run.case.grown_at[0])
    begin = _BEGIN * run.case.steps
    return [(tokens, loss) for step, tokens, loss in run.evaluations if begin <= step <= end]


def _scatter(points: Sequence[tuple[float, float]]) -> float:
    """Return the standard deviation of losses, from the distance of each from the line through its
    neighbours, against the logarithm of tokens; 0 of too few."""
    squares = []
    for (begin, middle), (x, y), (end, other) in zip(points, points[1:], points[2:], strict=False):
        share = math.log(x / begin) / math.log(end / begin)
        distance = y - (1 - share) * middle - share * other
        squares.append(distance**2 / (1 + share**2 + (1 - share) ** 2))
    return math.sqrt(fmean(squares)) if squares else 0.0


def _usual_trend(pilot: Pilot, log_tokens: float) -> float:
    """Return b around a number of tokens before the growth, in the runs of docs/pilot.md."""
    return _TREND[0] + _TREND[1] * (log_tokens - math.log(pilot.small.parameters))


def _trend(pilot: Pilot, runs: Sequence[PilotRun]) -> tuple[float, float] | None:
    """Return how far d ln ρ / d ln t lies above `_usual_trend`, and its standard deviation, where ρ t are the
    tokens after which the final size from scratch has the loss of the small model after t, from where ρ is
    highest on: in their first steps, sizes differ otherwise. None: too few evaluations."""
    arm = "small" if any(run.case.arm == "small" for run in runs) else "grown"
    final = _stable(pilot, _longest(runs, "final"))
    points = []
    for tokens, loss in _stable(pilot, _longest(runs, arm)):
        for (before, high), (after, low) in pairwise(final):
            if low <= loss <= high and low < high:
                share = (high - loss) / (high - low)
                equal = math.log(before) + share * math.log(after / before)
                points.append((math.log(tokens), equal - math.log(tokens)))
                break
    highest = max(range(len(points)), key=lambda n: points[n][1], default=0)
    points = points[highest:]
    if len(points) < _FEWEST:
        return None
    slope, _ = linear_regression(*zip(*points, strict=True))
    begin, end = points[0][0], points[-1][0]
    return slope - _usual_trend(pilot, (begin + end) / 2), _MEASURED_ERROR / (end - begin)


@dataclass(frozen=True)
class ExpectedSaving:
    """What a schedule is expected to save of the compute with which the final size from scratch has the
    same loss."""

    share: float
    """0.2: 20 % less compute; below 0: more"""
    low: float
    high: float
    """With 95 % confidence."""
    of_time: float
    """The same of seconds, as far as steps take them."""
    tokens: float
    """Tokens after which the final size from scratch has the loss of the run's end."""
    extrapolates: tuple[str, ...]
    """Where the run is beyond what the pilot measured."""
    source: str = ""
    family: Shares | None = None
    """Of the FLOPs of all sizes from scratch, each to its own loss; None: the run has no branches."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return asdict(self)


def predict_saving(pilot: Pilot, *runs: Sequence[Spent], source: str = "") -> ExpectedSaving:
    """Predict the saving of a run.

    Args:
        runs: what it spends on its stages; of several possibilities the interval covers all.
        source: the name of the pilot.

    Raises:
        ValueError: see `PilotFindings`; or the run does not grow.
    """
    if not runs or not all(before_growth(costs) for costs in runs):
        raise ValueError("the run does not grow before its end")
    findings = PilotFindings(pilot)
    middles, lows, highs = [], [], []
    for run_costs in runs:
        tokens = [worth(run_costs, exponent) for exponent in findings.exponents(run_costs)]
        flops = sum(stage.flops_per_token * stage.tokens for stage in run_costs)
        seconds = sum(_seconds(pilot, stage.flops_per_token) * stage.tokens for stage in run_costs)
        final = pilot.final.flops_per_token
        shares = sorted(1 - flops / (final * worth_of_tokens) for worth_of_tokens in tokens)
        middle = median(tokens)
        of_time = 1 - seconds / (_seconds(pilot, final) * middle)
        middles.append((1 - flops / (final * middle), of_time, middle))
        lows.append(shares[round(0.025 * DRAWS)])
        highs.append(shares[round(0.975 * DRAWS) - 1])
    share, of_time, tokens_worth = (fmean(column) for column in zip(*middles, strict=True))
    extrapolations = _extrapolations(findings, runs)
    return ExpectedSaving(
        share, min(lows), max(highs), of_time, tokens_worth, extrapolations, source
    )


def _seconds(pilot: Pilot, flops_per_token: float) -> float:
    """Return the time of a token, linear in its FLOPs between the two sizes that were measured."""
    small, final = pilot.small, pilot.final
    difference = final.flops_per_token - small.flops_per_token
    share = (flops_per_token - small.flops_per_token) / difference if difference else 1.0
    step = small.seconds_per_step + share * (final.seconds_per_step - small.seconds_per_step)
    return step / pilot.tokens_per_step


def _extrapolations(findings: PilotFindings, runs: Sequence[Sequence[Spent]]) -> tuple[str, ...]:
    """Return where runs are beyond what a pilot measured."""
    pilot_runs = [(before_growth(run.run.spent), run.run.tokens) for run in findings.grown_cases]
    new_runs = [(before_growth(costs), sum(stage.tokens for stage in costs)) for costs in runs]
    warnings = []
    latest, most_tokens = (
        max(before for before, _ in pilot_runs),
        max(before for before, _ in new_runs),
    )
    if most_tokens > 1.01 * latest:
        warnings.append(
            f"the model grows after {si(round(most_tokens))} tokens, {most_tokens / latest:.3g} times as many as the "
            "pilot measured"
        )
    shares, new_shares = (
        [before / tokens for before, tokens in pairs] for pairs in (pilot_runs, new_runs)
    )
    pilot_share = fmean(shares)
    furthest = max(new_shares, key=lambda share: abs(share - pilot_share))
    if abs(furthest - pilot_share) > _SAME_SHARE:
        warnings.append(
            f"{100 * furthest:.0f} % of the tokens come before the final size, in the pilot "
            f"{100 * pilot_share:.0f} %"
        )
    lead = fmean(run.token_worth for run in findings.grown_cases)
    if lead > _AHEAD:
        warnings.append(
            f"in the pilot's few steps a token of the small model was worth {lead:.2f} of the final "
            "size, as in no long run: a longer pilot predicts better"
        )
    small = findings.pilot.small.flops_per_token
    if any(abs(costs[0].flops_per_token / small - 1) > 0.01 for costs in runs):
        warnings.append("the run begins with another size than the pilot's")
    return tuple(warnings)
