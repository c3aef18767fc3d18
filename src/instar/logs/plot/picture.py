"""Charts as files; without matplotlib, the error names the extra that brings it."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Literal

from instar.config.errors import ConfigError
from instar.logs.plot.chart import Chart


def check_matplotlib() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError.of(
            "plots need matplotlib, which is not installed",
            hint="pip install 'instar[plot]'; without it: --format json",
        ) from error


def picture(chart: Chart, kind: Literal["png", "svg", "pdf"]) -> bytes:
    """Return the chart as the content of a file.

    Raises:
        ConfigError: matplotlib is not installed; names the extra.
    """
    check_matplotlib()
    from instar.logs.plot.figure import draw, render_figure

    return render_figure(partial(draw, chart), kind)
