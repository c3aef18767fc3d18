"""Ticks of a picture's axes: round numbers, with one unit along an axis."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from instar.logs.plotting.numbers import POWERS, base_of, decades, power_text, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def number_ticks(axis: Any, name: str) -> None:
    """Round numbers with one unit; of a clock, round in what it is read in."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    low, high = sorted(axis.get_view_interval())
    base = base_of(name, high)
    steps = [1, 2, 3, 6, 10] if base in (60, 3600) and high < 60 * base else [1, 2, 2.5, 5, 10]
    count = 6 if axis.axis_name == "x" else 5
    found = base * np.asarray(MaxNLocator(count, steps=steps).tick_values(low / base, high / base))
    if base > 1:
        axis.set_major_locator(FixedLocator([place for place in found if low <= place <= high]))
    else:
        axis.set_major_locator(MaxNLocator(count, steps=steps))

    def text(place: float, _: int | None = None) -> str:
        return written(name, [place, high])[0]

    axis.set_major_formatter(FuncFormatter(text))


def decades_ticks(axis: Any, name: str) -> None:
    """Powers of ten along a logarithmic axis; round numbers where there are less than two."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    low, high = sorted(axis.get_view_interval())
    told = power_text if name in POWERS else lambda place: written(name, [place])[0]
    axis.set_major_locator(FixedLocator(decades(low, high, 7)))
    axis.set_major_formatter(FuncFormatter(lambda place, _: told(place)))
    axis.set_minor_formatter(NullFormatter())


def clock_ticks(axes: Axes) -> None:
    from matplotlib import dates as typed_dates
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    dates: Any = typed_dates
    low, high = axes.get_xlim()
    day = 86400.0
    zone = datetime.fromtimestamp(high).astimezone().tzinfo or UTC
    locator = dates.AutoDateLocator(tz=zone, minticks=4, maxticks=7)
    begin, end = datetime.fromtimestamp(low, zone), datetime.fromtimestamp(high, zone)
    places = np.array(locator.tick_values(begin, end))
    texts = dates.ConciseDateFormatter(locator, tz=zone)
    labels = texts.format_ticks(places)
    axes.xaxis.set_major_locator(FixedLocator(list(places * day)))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda place, _: labels[int(np.abs(places * day - place).argmin())])
    )
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(
        f"time ({zone.tzname(end)}{', ' + texts.get_offset() if texts.get_offset() else ''})"
    )
