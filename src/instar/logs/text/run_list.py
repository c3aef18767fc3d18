"""Formats a list of runs as a table; branches stand below their trunks."""

from __future__ import annotations

from collections.abc import Sequence

from instar.logs.query.runs import Row, branch_start, in_trees
from instar.logs.text.stdout import indent_text
from instar.logs.text.values import NONE, best_text, date
from instar.record.format import duration, loss, si

HEADERS = ("id", "name", "state", "step", "tokens", "loss", "best val", "at", "time", "started")
NUMBERS = ("step", "tokens", "loss", "best val", "at", "time")
OPTIONAL = ("at", "tokens", "started", "time", "name", "tags", "branch at", "best val", "loss")
"""Columns that are omitted on a narrow terminal, in this order; `tags` and `branch at` are there if a run has
some."""


def run_table(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return headers and cells of a list of runs; branches are below their trunks."""
    trees = in_trees(rows, lambda row: row.summary)
    headers: tuple[str, ...] = HEADERS
    cells: list[tuple[str, ...]] = [_row_cells(row, depth) for depth, row in trees]
    branches = [branch_start(row.summary) for _, row in trees]
    if any(branches):
        steps = (f"step {first.step:,}" if first else "" for first in branches)
        headers = (*headers, "branch at")
        cells = [(*row_cells, step) for row_cells, step in zip(cells, steps, strict=True)]
    if any(row.summary.imported_from for row in rows):
        origins = (row.summary.imported_from or "" for _, row in trees)
        headers = (*headers, "imported from")
        cells = [(*row_cells, origin) for row_cells, origin in zip(cells, origins, strict=True)]
    if any(row.labels.tags for row in rows):
        tags = (" ".join(row.labels.tags) for _, row in trees)
        headers = (*headers, "tags")
        cells = [(*row_cells, tag) for row_cells, tag in zip(cells, tags, strict=True)]
    return headers, cells


def _row_cells(row: Row, depth: int) -> tuple[str, ...]:
    summary = row.summary
    unknown_tokens = (None, 0) if summary.imported_from else (None,)
    return (
        indent_text(summary.id, depth),
        summary.name,
        row.status.state,
        NONE if summary.step is None else f"{summary.step:,}",
        NONE if summary.tokens in unknown_tokens else si(summary.tokens or 0),
        NONE if summary.loss is None else loss(summary.loss),
        best_text(summary.best_metric, summary.best),
        NONE if summary.best_step is None else f"{summary.best_step:,}",
        NONE if row.time_s is None else duration(row.time_s),
        date(summary.started or 0.0)[:-3] or NONE,
    )
