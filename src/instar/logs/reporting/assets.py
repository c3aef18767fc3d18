"""The files of which pages with charts are made, put into one page that asks for none."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

CHARTS = (
    "uplot.min.js",
    "texts.js",
    "line.js",
    "paint.js",
    "tip.js",
    "marks.js",
    "charts.js",
)
"""What a chart is drawn by, in the order in which a page has to load it."""
STYLES = ("uplot.min.css", "charts.css")


def asset(name: str) -> str:
    """The text of a file of `logs/page/`."""
    return (files("instar.logs") / "page" / name).read_text(encoding="utf-8")


def program(*names: str) -> dict[str, str]:
    """The charts' program and that of these files, as a page's template takes it: `program`, and
    `program_hash`, by which the page's policy knows it."""
    text = "\n".join(map(asset, (*CHARTS, *names)))
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {"program": text, "program_hash": digest}


def style(*names: str) -> str:
    """The charts' style sheets and these."""
    return "\n".join(map(asset, (*STYLES, *names)))
