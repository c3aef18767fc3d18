"""Builds the sections of a page that compare runs: a table of their figures, and where configs differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

from instar.config.errors import shorten_text
from instar.config.fields import differing_keys
from instar.config.origins import plain_text
from instar.extensions.board.blocks import (
    MAX_ROWS,
    Cell,
    Section,
    date_text,
    notices,
    printable_section,
    table_section,
    text_section,
)
from instar.extensions.board.sections import folder_name, key_figures
from instar.logs.query.config import config_values
from instar.logs.query.groups import RunGroup, comparability, short_values, warnings_on_data
from instar.logs.query.labels import RunLabels, labels_of
from instar.logs.query.stages import RunStage, stages
from instar.logs.query.summary import Summary, summarize
from instar.logs.read.record import RunRecord

_FIRST_KEYS = 3
"""keys in which configs differ that are columns of the table from the start"""
_MINOR = ("training FLOPs", "peak memory", "operations", "model", "started", "note")
"""columns that are hidden until they are chosen"""
_RECORDED = ("name", "record", "checkpoint", "resume")
"""keys and sections that do not influence training"""


def comparison(records: Sequence[RunRecord]) -> list[Section]:
    """Return warnings if losses are not comparable, a table with a row for each run, and the keys in
    which the configs differ."""
    configs, faults = config_values([record.run for record in records])
    groups = [
        RunGroup(record.run.path.name, (record.run,), (config,))
        for record, config in zip(records, configs, strict=True)
    ]
    evaluations = comparability(groups)
    texts = [*evaluations.differing, *warnings_on_data(configs, held_out=not evaluations.is_known)]
    warnings = [("Warning:", None, text) for text in texts]
    differences = list[list[Cell]]()
    for key, values in differing_keys([config or None for config in configs]).items():
        full_texts = [plain_text(config[key]) if key in config else "" for config in configs]
        short = short_values(key, values, full_texts)
        cells: list[Cell] = [
            {"text": brief, "full": "" if brief == text else shorten_text(text, 20_000)}
            for brief, text in zip(short, full_texts, strict=True)
        ]
        differences.append([key, *cells])
    heads = ("", *(folder_name(record) for record in records))
    title = "Differences between the configs"
    blocks = [
        notices("", warnings, MAX_ROWS),
        _runs(records, differences),
        text_section(*(f"Not compared: {shorten_text(fault)}" for fault in faults)),
        table_section(title, heads, differences, MAX_ROWS, runs=True),
    ]
    return [printable_section(block) for block in blocks if block]


def _runs(records: Sequence[RunRecord], differences: Sequence[Sequence[Cell]]) -> Section:
    """Return the table of runs: `heads`, those `shown` from the start, and `rows` with a name and a
    cell `[text, note, number]` or null for each head."""
    rows = list[dict[str, list[Any]]]()
    for record, labels in zip(records, labels_of([r.run for r in records]), strict=True):
        rows.append(_row(summarize(record), stages(record), labels))
    for key, *cells in differences:
        for row, cell in zip(rows, cells, strict=True):
            text = cell["text"] if isinstance(cell, dict) else cell
            row[str(key)] = [shorten_text(text, 60), "", _number(text)]
    keys = [str(key) for key, *_ in differences]
    first = list(islice((k for k in keys if k.partition(".")[0] not in _RECORDED), _FIRST_KEYS))
    present = dict.fromkeys(head for row in rows for head in row)
    tags = ["tags"] if "tags" in present else []
    heads = list(dict.fromkeys(("state", *tags, *first, *present)))
    visible = [head for head in heads if head in first or head not in (*_MINOR, *keys)]
    return {
        "kind": "runs",
        "title": "Runs",
        "heads": heads,
        "shown": visible,
        "rows": [
            {"name": folder_name(record), "cells": [row.get(head) for head in heads]}
            for record, row in zip(records, rows, strict=True)
        ],
    }


def _row(
    summary: Summary, run_stages: Sequence[RunStage], labels: RunLabels
) -> dict[str, list[Any]]:
    row: dict[str, list[Any]] = {"state": [summary.state, "", None]}
    if summary.imported_from:
        row["imported from"] = [shorten_text(summary.imported_from, 60), "", None]
    if labels.tags:
        row["tags"] = [", ".join(shorten_text(tag, 40) for tag in labels.tags[:20]), "", None]
    for label, value, note, number in key_figures(summary, run_stages):
        row[label] = [value, note, number if math.isfinite(number) else None]
    count = len(summary.operations)
    row["operations"] = [str(count), "", count]
    if summary.model:
        row["model"] = [summary.model, "", None]
    if summary.started:
        row["started"] = [date_text(summary.started), "", summary.started]
    if labels.note:
        row["note"] = [shorten_text(labels.note), "", None]
    return row


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
