"""What a forecast says of a run's saving: by its pilot, or else by what other runs saved; and of a family of
sizes.

Without a pilot the exponent θ of `saving` is that of the runs of docs/pilot.md and docs/growth-study.md,
GPTs of 0.1 to 0.3 M parameters. That is a range and not a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.config.origins import SCHEDULE
from instar.extensions import ForecastNote
from instar.extensions.lab.pilot_file import Spent, pilot_path, read_pilot
from instar.extensions.lab.saving import (
    ExpectedSaving,
    PilotFindings,
    Shares,
    predict_saving,
    spending,
    worth,
)
from instar.growth.operators import is_growth
from instar.models.architecture import Architecture
from instar.record.format import si
from instar.schedule.forecast import Forecast
from instar.schedule.render import wrapped_row

EXPONENTS = (-0.2, 0.4, 0.75)
"""θ: the lowest of the runs (AdamW, 6 tokens per parameter), the middle of those with Muon (0.41 and 0.50 where both sides are
tuned alike, 8 × 32 and 12 × 32), and the highest (AdamW, 20 tokens per parameter)."""
TOKENS_PER_PARAMETER = (5.0, 20.0)
"""Of the final size, in these runs."""
MOST_COPIES = 4
LATEST = 0.8
"""The largest factor of layers, and the latest growth, as a share of the tokens, with which they saved."""
_COPIES = "stack_layers"


@dataclass(frozen=True)
class TypicalSaving:
    """What other runs saved with the costs of this one, which was not measured."""

    unknown: str
    """Why there is no number; empty if there is one."""
    shares: Shares | None = None
    """Of the FLOPs with which the final size from scratch has the same loss."""
    family: Shares | None = None
    """Of the FLOPs of all sizes from scratch, each to its own loss; None: the run has no branches."""


def expected_saving(
    forecast: Forecast, loaded_config: Loaded, path: str | None, file: Path | None = None
) -> ExpectedSaving | TypicalSaving | None:
    """Return the saving that a pilot predicts for a run, or else what is typical of its schedule; None if
    neither says anything.

    Args:
        path: of the run's config; its pilot lies beside its schedule's file, or else beside it.
        file: the pilot, in place of these.

    Raises:
        ConfigError: the pilot cannot be read; or `file` says nothing of this run.
    """
    schedule = loaded_config.places.get(f"{SCHEDULE}[0]")
    sources = [source for source in (schedule and schedule.source, path) if source]
    source_files = (pilot_path(source) for source in sources if Path(source).is_file())
    pilot_file = file or next((candidate for candidate in source_files if candidate.exists()), None)
    if pilot_file is None:
        return typical(forecast)
    pilot = read_pilot(pilot_file)
    runs = {spending(forecast), spending(forecast, late=True)} - {()}
    last = forecast.stages[-1]
    try:
        if last.flops_per_token != pilot.final.flops_per_token:
            sizes = [si(n) for n in (pilot.final.parameters, last.parameters.total)]
            raise ValueError("its model ends with {} parameters, this run's with {}".format(*sizes))
        saving = predict_saving(pilot, *runs, source=str(pilot_file))
        exponents = PilotFindings(pilot).exponents(spending(forecast))
    except ValueError as error:
        if file is None:
            return typical(forecast)
        hint = "measure this run with: instar schedule pilot"
        raise ConfigError.of(f"predicts nothing here: {error}", str(pilot_file), hint) from None
    saving = replace(saving, family=family_saving(forecast, exponents))
    if different_keys := pilot.differing(loaded_config.config):
        extrapolations = (
            *saving.extrapolates,
            f"measured with other settings of {', '.join(different_keys)}",
        )
        saving = replace(saving, extrapolates=extrapolations)
    return saving


def saving_values(saving: ExpectedSaving | TypicalSaving | None) -> dict[str, Any]:
    """Return JSON values: `saving`, which was measured, or `typical_saving`, which was not."""
    is_measured = isinstance(saving, ExpectedSaving)
    values = None if saving is None else asdict(saving)
    return {
        "saving": values if is_measured else None,
        "typical_saving": None if is_measured else values,
    }


def typical(forecast: Forecast) -> TypicalSaving | None:
    """Return what a schedule of copies may save; None if it grows otherwise, or not at all."""
    operation_names = [s.operation.split()[0] for s in forecast.stages[1:] if not s.skipped]
    operations = {name for name in operation_names if is_growth(name)}
    if operations != {_COPIES} or forecast.unit != "token":
        return None
    costs = spending(forecast)
    if why := _unknown(forecast, costs):
        return TypicalSaving(why)
    low, middle, high = (
        saved_share([costs], _flops(costs), theta) for theta in reversed(EXPONENTS)
    )
    return TypicalSaving("", (low, middle, high), family_saving(forecast, EXPONENTS))


def saving_note(
    forecast: Forecast, loaded_config: Loaded, path: str | None, files: Mapping[str, Path | None]
) -> ForecastNote:
    """Return what growth is expected to save in the run of a forecast, by its pilot or as is typical.

    Args:
        path: of the run's config.
        files: `pilot`: the pilot to use, instead of the config's.
    """
    saving = expected_saving(forecast, loaded_config, path, files.get("pilot"))
    return ForecastNote("" if saving is None else render_saving(saving), saving_values(saving))


def render_saving(saving: ExpectedSaving | TypicalSaving) -> str:
    """Render what a schedule is expected to save, in lines of at most 80 columns."""
    texts = _typical(saving) if isinstance(saving, TypicalSaving) else _expected(saving)
    return "\n".join(wrapped_row("growth", texts))


def saved_share(members: Sequence[Sequence[Spent]], flops: float, exponent: float) -> float:
    """Return the share of the FLOPs that models save which cost `flops` in all.

    Args:
        members: what each has spent, stage by stage, also where others have spent it too.
    """
    return 1 - flops / sum(m[-1].flops_per_token * worth(m, exponent) for m in members)


def family_saving(forecast: Forecast, exponents: Sequence[float]) -> Shares | None:
    """Return the lowest, the median and the highest share that a trunk with its branches saves of the
    FLOPs of all sizes from scratch, for several θ; None without branches or their steps."""
    trunk = spending(forecast)
    members, flops = [trunk], _flops(trunk)
    for branch in forecast.branches:
        if branch.first_step is None or branch.early is None or not branch.early.tokens:
            return None
        branch_spent = Spent(branch.early.flops / branch.early.tokens, float(branch.early.tokens))
        members.append((*spending(forecast, end=branch.first_step), branch_spent))
        flops += float(branch.early.flops)
    if len(members) == 1 or not trunk:
        return None
    shares = sorted(saved_share(members, flops, theta) for theta in exponents)
    count = len(shares)
    return shares[round(0.025 * count)], median(shares), shares[round(0.975 * count) - 1]


def _flops(costs: Sequence[Spent]) -> float:
    return sum(stage.flops_per_token * stage.tokens for stage in costs)


def _unknown(forecast: Forecast, costs: Sequence[Spent]) -> str:
    """Return why the runs that were measured say nothing of this one; empty if they do."""
    if not costs or forecast.early != forecast.late:
        return "when it grows or ends is not known"
    final = forecast.stages[-1]
    begin, end = forecast.stages[0].architecture, final.architecture
    if not (isinstance(begin, Architecture) and isinstance(end, Architecture)):
        return "only GPTs have been measured"
    factor = end.n_layer / max(begin.n_layer, 1)
    tokens = sum(stage.tokens for stage in costs)
    ratio = tokens / final.parameters.total
    last = final.flops_per_token
    before = sum(s.tokens for s in costs if s.flops_per_token != last) / tokens
    low, high = TOKENS_PER_PARAMETER
    if not low <= ratio <= high:
        return f"the run has {ratio:.2g} tokens per parameter, and those that were measured {low:g} to {high:g}"
    if factor > MOST_COPIES:
        return f"the layers become {factor:g} times as many, in what was measured at most {MOST_COPIES}"
    if before > LATEST:
        return f"it grows after {100 * before:.0f} % of its tokens, in what was measured at most {100 * LATEST:g}"
    return ""


def _expected(saving: ExpectedSaving) -> list[str]:
    return [
        f"saves {_percent((saving.low, saving.share, saving.high))}, {100 * saving.of_time:.0f} % of the "
        "time in steps; from scratch, the final size has the loss of this run's end after "
        f"{si(round(saving.tokens))} tokens",
        *_family(saving.family),
        *(f"extrapolated: {why}" for why in saving.extrapolates),
        f"predicted from {saving.source}",
    ]


def _typical(saving: TypicalSaving) -> list[str]:
    measure = "`instar schedule pilot` measures it"
    if saving.shares is None:
        return [f"nobody can say what it saves: {saving.unknown}; {measure}"]
    return [
        f"may save {_percent(saving.shares)}",
        *_family(saving.family),
        "not measured for this config: so much saved other copies of layers, in GPTs of 0.1 to 0.3 M "
        f"parameters; {measure}",
    ]


def _family(shares: Shares | None) -> list[str]:
    return [f"with its branches {_percent(shares)} of all sizes from scratch"] if shares else []


def _percent(shares: Shares) -> str:
    low, middle, high = (f"{100 * share:.0f}" for share in shares)
    return f"{middle} % of the FLOPs ({low} to {high} %)"
