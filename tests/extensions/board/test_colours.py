"""Eight runs are eight colours, for all eyes, on light and on dark pages, and on paper."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from colours import VISIONS, closest, contrast

from instar.logs.plot.legend import COLOURS

CSS = (files("instar.extensions.board") / "charts" / "charts.css").read_text(encoding="utf-8")


def pairs(name: str) -> tuple[str, str]:
    """A colour of the pages, light and dark."""
    match = re.search(rf"--ic-{name}: light-dark\((#\w{{6}}), (#\w{{6}})\);", CSS)
    assert match is not None, name
    return match[1], match[2]


LIGHT, DARK = zip(*(pairs(str(number)) for number in range(8)), strict=True)


def test_plots_have_the_colours_of_the_pages() -> None:
    assert COLOURS == LIGHT


@pytest.mark.parametrize("vision", VISIONS)
def test_no_two_of_eight_runs_look_alike(vision: str) -> None:
    assert closest([*LIGHT], vision) >= 15
    assert closest([*DARK], vision) >= 15


def test_the_measure_sees_colours_that_look_alike() -> None:
    """Colours that differ in hue alone: three, under deuteranopia."""
    before = [
        "#0067a5",
        "#c24a00",
        "#00835f",
        "#a8477f",
        "#b07a00",
        "#2a9fd0",
        "#5b4fb3",
        "#5f6670",
    ]
    assert closest(before, "normal") > 15
    assert closest(before, "deuteranopia") < 5


def test_every_colour_stands_out_from_its_page() -> None:
    light, dark = pairs("paper")
    assert all(contrast(colour, light) >= 3 for colour in LIGHT)
    assert all(contrast(colour, dark) >= 3 for colour in DARK)
