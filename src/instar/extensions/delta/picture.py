"""Draws how much, and where, the links of a chain of deltas change the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from instar.config.errors import ConfigError
from instar.extensions.delta.format.statistics import LinkStatistics
from instar.logs.plot.figure import render_figure
from instar.logs.plot.legend import COLOURS, INK, WIDTH

_CURVE, _ROW = 1.8, 0.16
"""inches: height of a curve, and of a layer"""
_LARGEST = 12.0
_TICKS = 8


def deltas_picture(
    links: Sequence[LinkStatistics], title: str, kind: Literal["png", "svg", "pdf"]
) -> bytes:
    """Return a file with three panels over the links of a chain, at even distances: density,
    overlap, and the density of each layer.

    Raises:
        ConfigError: there are no links.
    """
    if not links:
        raise ConfigError.of("the chain has no links yet, only anchors: there is nothing to draw")
    return render_figure(lambda: _draw(links, title), kind)


def _draw(links: Sequence[LinkStatistics], title: str) -> Figure:
    layers = list(dict.fromkeys(name for link in links for name in link.layers))
    heights = [_CURVE, _CURVE, max(_CURVE, min(_LARGEST, _ROW * len(layers)))]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    rows = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": heights})
    _curve(rows[0], [link.whole.density for link in links], "share of weights changed")
    _curve(rows[1], [link.whole.overlap for link in links], "overlap with the link before")
    _map(figure, rows[2], links, layers)
    places = np.unique(np.linspace(0, len(links) - 1, _TICKS).astype(int))
    # after a resume, steps go back
    rows[2].set_xticks(places, [f"{links[place].step:,}" for place in places])
    rows[2].set_xlabel("step")
    rows[0].set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    return figure


def _curve(axes: Axes, values: Sequence[float | None], label: str) -> None:
    numbers = [np.nan if value is None else value for value in values]
    axes.plot(range(len(numbers)), numbers, color=COLOURS[0], marker=".", markersize=3)
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel(label)


def _map(
    figure: Figure, axes: Axes, links: Sequence[LinkStatistics], layers: Sequence[str]
) -> None:
    density = np.full((len(layers), len(links)), np.nan)
    for column, link in enumerate(links):
        for name, share in link.layers.items():
            density[layers.index(name), column] = share.density
    style: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": "viridis"}
    image = axes.imshow(density, vmin=0.0, **style)
    axes.grid(visible=False)
    label_rows = range(0, len(layers), -(-len(layers) // int(_LARGEST / _ROW)))
    axes.set_yticks(list(label_rows), [layers[row] for row in label_rows])
    figure.colorbar(image, ax=axes, label="share changed", pad=0.01)
