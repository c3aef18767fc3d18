"""What growth is expected to save, as text; and what the lab says of a forecast."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from instar.config.load import Loaded
from instar.extensions import ForecastNote
from instar.extensions.lab.expected import TypicalSaving, expected_saving, saving_values
from instar.extensions.lab.saving import ExpectedSaving, Shares
from instar.record.format import si
from instar.schedule.forecast import Forecast
from instar.schedule.render import wrapped_row


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
