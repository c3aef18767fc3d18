"""Draws a chart in a terminal with plotext, in braille dots or ASCII."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np

from instar.config.errors import ConfigError, visible
from instar.logs.plot.chart import (
    POWERS,
    Annotation,
    Chart,
    Panel,
    Polyline,
    axis_base,
    curve_text,
    decades,
    panel_label,
    power_of,
    power_text,
    round_places,
    short_names,
    ten_to,
    tick_texts,
)
from instar.record.format import encodable_as

_COLOURS = ("blue+", "orange+", "green+", "magenta+", "cyan+", "red+")
_SIGNS = "•×+o*#@%&$"
_ASCII_SIGNS = ".x+o*#@%&$"
_MAX_CURVES = 10
_MAX_MARKS = 8
_MAX_MARKED_RUNS = 3
_MIN_ROWS = 7
"""minimum rows of a panel"""
_BOX = str.maketrans("│─┌┐└┘├┤┬┴┼", "|-+++++++++")
_POWER = re.compile("(?:([\\d.]+)·)?10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)")
_FROM_SUPERSCRIPT = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


@dataclass(frozen=True)
class TerminalSize:
    """Size and abilities of a terminal."""

    width: int = 80
    height: int = 24
    colour: bool = False
    ascii: bool = False


@dataclass(frozen=True)
class _Look:
    sign: str
    """marker of its points"""
    key: str
    """sign in the legend"""
    colour: str | None
    is_joined: bool


def terminal(chart: Chart, size: TerminalSize) -> str:
    """Return the chart in lines of at most the terminal's width.

    Raises:
        ConfigError: plotext is not installed; names the extra.
    """
    try:
        import plotext
    except ImportError as error:
        raise ConfigError.of(
            "plots on a terminal need plotext, which is not installed",
            hint="pip install 'instar[plot]'; without it: --format json",
        ) from error
    panels = list(_panels(chart))
    marks = _lines_marked(chart)
    footer = _mark_lines(chart, marks, size)
    room = size.height - len(footer) - 3
    height = max(_MIN_ROWS, min(room // len(panels) - 2, size.width // 3))
    heights = [
        max(_MIN_ROWS, height // 2) if panel.metrics == ("lr",) else height for panel in panels
    ]
    ticks = [_y_ticks(panel, rows) for panel, rows in zip(panels, heights, strict=True)]
    ticks = [(at, [_words(text, size) for text in texts]) for at, texts in ticks]
    label_width = max(len(text) for _, texts in ticks for text in texts)
    curves = [
        _draw_panel(
            plotext, chart, panel, size, rows, marks, at, [t.rjust(label_width) for t in texts]
        )
        for panel, rows, (at, texts) in zip(panels, heights, ticks, strict=True)
    ]
    text = "\n".join([_words(chart.title, size), *curves, *footer])
    if size.ascii:
        text = text.translate(_BOX)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _panels(chart: Chart) -> Iterator[Panel]:
    """Yield the panels; curves on a second axis become their own panel."""
    for panel in chart.panels:
        yield replace(panel, right=())
        if panel.right:
            yield Panel(panel_label(["lr"], ["token"]), panel.right)


def _draw_panel(
    plotext: Any,
    chart: Chart,
    panel: Panel,
    size: TerminalSize,
    height: int,
    marks: Sequence[Annotation],
    y_places: list[float],
    y_texts: list[str],
) -> str:
    figure = plotext.figure
    plotext.terminal.limit(False, False)
    figure.clear()
    figure.theme("simple" if size.colour else "colorless")
    last = panel.curves is (chart.panels[-1].right or chart.panels[-1].curves)
    figure.plot_size(size.width, height + last)
    figure.axes(False, axis="x", side="upper")
    figure.axes(False, axis="y", side="right")
    low, high = _y_range(panel)
    for mark in marks:
        bar = plotext.marker("│", pixel=_bar_colour(chart, mark, size) or "default")
        place = float(_on(mark.x, log=chart.log_x))
        figure.draw(figure.signal([place, place], [low, high], marker=bar).lines(True))
    looks = _looks(panel, size)
    for curve, look in zip(panel.curves, looks, strict=False):
        marker = plotext.marker(look.sign, pixel=(look.colour or "default", "default"))
        for line in _parts(curve.line):
            x, y = _on(line.x, log=chart.log_x), _on(line.y, log=panel.log)
            inside = (y >= low) & (y <= high)
            signal = figure.signal(x[inside].tolist(), y[inside].tolist(), marker=marker)
            figure.draw(signal.lines(look.is_joined))
    figure.ruler("x").lim(*_on(chart.limits, log=chart.log_x).tolist())
    figure.ruler("y").lim(low, high).ticks(y_places, y_texts)
    if last:
        places, texts = _x_ticks(chart, size.width)
        figure.ruler("x").ticks(places, [_words(text, size) for text in texts])
    else:
        figure.ruler("x").frequency(0)
    body = figure.build().string(colorless=not size.colour).rstrip("\n")
    below = [_words(chart.label, size).rjust(size.width)] if last else []
    return "\n".join([*_legend(chart, panel, looks, size), body, *below])


def _looks(panel: Panel, size: TerminalSize) -> list[_Look]:
    """Return a colour per curve, or a sign per curve without colours; the first is a dotted line."""
    signs = _ASCII_SIGNS if size.ascii else _SIGNS
    dots = "." if size.ascii else "braille"
    has_several_runs = len({curve.run for curve in panel.curves}) > 1
    looks = []
    for number, curve in enumerate(panel.curves[:_MAX_CURVES]):
        shade = curve.run if has_several_runs else number
        colour = _COLOURS[shade % len(_COLOURS)] if size.colour else None
        has_few_points = len(curve.line) < 2 or (
            curve.held_out and len(curve.line) <= size.width // 3
        )
        if has_few_points or (number and colour is None):
            sign = signs[number % len(signs)] if colour is None or size.ascii else "•"
            looks.append(_Look(sign, sign, colour, is_joined=not has_few_points and number == 0))
        else:
            looks.append(_Look(dots, "." if size.ascii else "⠤", colour, is_joined=True))
    return looks


def _legend(
    chart: Chart, panel: Panel, looks: Sequence[_Look], size: TerminalSize
) -> Iterator[str]:
    """Yield the y axis's label and the signs of the curves, wrapped to the width."""
    yield _words(panel.label + "".join(f"  [{note}]" for note in panel.notes), size)
    if len(panel.curves) == 1 and len(chart.runs) == 1:
        return
    entries, names = [], short_names(chart.runs, size.width // 2)
    for curve, look in zip(panel.curves, looks, strict=False):
        words = [names[curve.run]] if len(chart.runs) > 1 else []
        words += [curve_text(curve.metric)] if len(panel.metrics) > 1 else []
        entries.append((look, _words(" ".join(words), size, size.width - 4)))
    n_omitted = len(panel.curves) - len(looks)
    line, used = "", 0
    for look, text in entries:
        length = len(text) + 4
        if used and used + length > size.width:
            yield line
            line, used = "", 0
        line += f"  {_tint(look.key, look.colour)} {text}"
        used += length
    yield line
    if n_omitted:
        yield f"  and {n_omitted} more"


def _y_range(panel: Panel) -> tuple[float, float]:
    values = np.concatenate([curve.line.y for curve in panel.curves])
    values = _on(values[np.isfinite(values)], log=panel.log)
    if panel.limits:
        low, high = _on(
            np.maximum(panel.limits, 1e-300) if panel.log else panel.limits, log=panel.log
        )
        return float(low), float(high)
    low, high = float(values.min()), float(values.max())
    if high - low <= 1e-6 * abs(high):
        margin = abs(low) / 10 or 1.0
        return low - margin, high + margin
    return low, high


def _y_ticks(panel: Panel, height: int) -> tuple[list[float], list[str]]:
    low, high = _y_range(panel)
    name = panel.metrics[0] if len(panel.metrics) == 1 else ""
    count = max(3, height // 3)
    if panel.log:
        places = decades(10**low, 10**high, count)
        return _on(places, log=True).tolist(), tick_texts("", places)
    places = round_places(low, high, count, axis_base(name, high))
    texts = tick_texts(name, places)
    if name in POWERS and (power := power_of(max(map(abs, places)))):
        texts = [text if text == "0" else f"{text}·{ten_to(power)}" for text in texts]
    return places, texts


def _x_ticks(chart: Chart, width: int) -> tuple[list[float], list[str]]:
    low, high = chart.limits
    count = max(3, width // 13)
    if chart.axis == "time":
        places = [low + (high - low) * n / (count - 1) for n in range(count)]
        form = "%H:%M:%S" if high - low < 86400 else "%m-%d %H:%M"
        return places, [f"{datetime.fromtimestamp(place):{form}}" for place in places]
    if chart.log_x:
        places = decades(low, high, count)
        texts = [power_text(p) if chart.axis in POWERS else tick_texts("", [p])[0] for p in places]
        return [float(np.log10(place)) for place in places], texts
    places = round_places(low, high, count, axis_base(chart.axis, high))
    return places, [tick_texts(chart.axis, [place, high])[0] for place in places]


def _lines_marked(chart: Chart) -> list[Annotation]:
    """Return the marks that get a vertical line; none if there are many runs."""
    if len(chart.runs) > _MAX_MARKED_RUNS:
        return []
    return [mark for mark in chart.marks if mark.kind != "checkpoint"]


def _mark_lines(chart: Chart, marks: Sequence[Annotation], size: TerminalSize) -> list[str]:
    """Return lines that explain the vertical lines, in order."""
    first: dict[tuple[str, int], Annotation] = {}
    for mark in marks:
        first.setdefault((mark.text, mark.run), mark)
    first_marks = list(first.values())[:_MAX_MARKS]
    places = [_words(_place_text(chart, mark.x), size) for mark in first_marks]
    label_width = max(map(len, places), default=0)
    names = short_names(chart.runs, size.width // 3)
    lines = []
    for at, mark in zip(places, first_marks, strict=True):
        of_run = f" of {names[mark.run]}" if len(chart.runs) > 1 else ""
        text = _words(f"{mark.text}{of_run}", size, size.width - label_width - 3)
        bar = _tint("│", _bar_colour(chart, mark, size))
        lines.append(f"{at.rjust(label_width)} {bar} {text}")
    n_omitted = len(first) - len(first_marks)
    return [*lines, f"{'':label_width}   and {n_omitted} more"] if n_omitted else lines


def _bar_colour(chart: Chart, mark: Annotation, size: TerminalSize) -> str | None:
    """Return the colour of a mark: of its run's curves if there are several runs."""
    if not size.colour:
        return None
    return _COLOURS[mark.run % len(_COLOURS)] if len(chart.runs) > 1 else "gray"


def _place_text(chart: Chart, x: float) -> str:
    if chart.axis == "time":
        return f"{datetime.fromtimestamp(x):%H:%M:%S}"
    if chart.axis == "step":
        return f"{x:,.0f}"
    rough = float(f"{x:.3g}")
    if chart.axis == "flops":
        return power_text(rough) if rough > 0 else "0"
    return tick_texts(chart.axis, [rough, chart.limits[1]])[0]


def _tint(text: str, colour: str | None) -> str:
    if colour is None:
        return text
    import plotext

    return str(plotext.colorize(text, colour))


def _parts(line: Polyline) -> Iterator[Polyline]:
    """Yield the parts of a line between its gaps."""
    mask = np.isfinite(line.y)
    edges = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
    for piece in np.split(np.arange(len(line)), edges):
        if len(piece) and mask[piece[0]]:
            yield Polyline(line.x[piece], line.y[piece])


def _on(values: Any, *, log: bool) -> Any:
    """Return places on a linear or logarithmic axis."""
    return np.log10(np.asarray(values)) if log else np.asarray(values, np.float64)


def _words(text: str, size: TerminalSize, width: int | None = None) -> str:
    """Return `text` in characters that the terminal can show, at most `width` or its width long."""
    text = visible(text)
    if size.ascii:
        text = encodable_as(_POWER.sub(_exponent, text), "ascii")
    width = size.width if width is None else width
    return text if len(text) <= width else text[: width - 1] + ("~" if size.ascii else "…")


def _exponent(power: re.Match[str]) -> str:
    """Return `5e-4` for `5·10⁻⁴`."""
    return f"{power[1] or 1}e{power[2].translate(_FROM_SUPERSCRIPT)}"
