"""How a comparison reads to a person, as text or as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from instar.config.dump import in_yaml
from instar.logs.comparing.compare import Cell, Comparison, ToLoss
from instar.logs.comparing.reach import Reached, Saving, saving_text
from instar.logs.telling.aligned import aligned, wrapped
from instar.logs.telling.words import NONE, markdown_table, metric_text
from instar.record.amounts import flops_text
from instar.record.lines import duration, si, unit_text

MOST_COLUMNS = 4
"""arms that have a column each where keys of configs differ"""
_LONGEST_VALUE = 60


@dataclass(frozen=True)
class Block:
    """A table with a line above it, or lines alone."""

    title: str
    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    numbers: bool = True
    """all columns but the first are numbers"""


def blocks(comparison: Comparison) -> Iterator[Block]:
    """All of a comparison, in the order in which it is told."""
    names = [arm.name for arm in comparison.arms]
    if any(len(arm.runs) > 1 for arm in comparison.arms):
        yield _arms(comparison)
    for metric, cells in comparison.metrics.items():
        yield Block(
            metric,
            ("", *(place.text(comparison.unit) for place in comparison.places)),
            tuple(
                (arm.name, *(_cell(metric, cell, len(arm.runs)) for cell in row))
                for arm, row in zip(comparison.arms, cells, strict=True)
            ),
        )
    if comparison.to_loss is not None:
        yield _to_loss(comparison, comparison.to_loss, names)
    if len(names) > 1:
        yield _config(comparison, names)


def text(comparison: Comparison, width: int | None = None) -> list[str]:
    """As aligned lines, of at most `width` columns as far as that can be."""
    lines: list[str] = []
    for block in blocks(comparison):
        lines += ["", block.title] if lines else [block.title]
        if block.rows:
            right = range(1, len(block.headers)) if block.numbers else ()
            lines += aligned((block.headers, *block.rows), right, width)
        lines += [line for note in block.notes for line in wrapped(f"  {note}", width)]
    return lines


def markdown(comparison: Comparison) -> list[str]:
    """As sections and tables."""
    lines = ["# Comparison"]
    for block in blocks(comparison):
        lines += ["", f"## {block.title}", ""]
        if block.rows:
            right = range(1, len(block.headers)) if block.numbers else ()
            rows = [[cell.replace("|", "\\|") for cell in row] for row in block.rows]
            lines += markdown_table(block.headers, rows, right=list(right))
        lines += ["", *(f"- {note}" for note in block.notes)] if block.notes else []
    return lines


def sentences(goal: ToLoss, names: Sequence[str], unit: str) -> Iterator[str]:
    """`b reaches val/loss 3 with 31% fewer FLOPs, 12% fewer tok than a`."""
    base = names[0]
    things = (
        ("flops", "FLOPs"),
        ("tokens", f"{unit}s"),
        ("step", "steps"),
        ("active_s", "active time"),
    )
    for name, by_axis, reached in zip(names[1:], goal.savings, goal.reached[1:], strict=True):
        told = [(found, what) for axis, what in things if (found := by_axis[axis]) is not None]
        if told:
            words = ", ".join(saving_text(found, what) for found, what in told)
            beside = _beside(max((found for found, _ in told), key=lambda found: found.pairs))
            yield f"{name} reaches {goal.metric} {goal.target:g} with {words} than {base}{beside}"
        else:
            neither = [
                who for who, found in ((base, goal.reached[0]), (name, reached)) if not any(found)
            ]
            who = " and ".join(neither) or "of no two runs of equal seed both"
            one = len(neither) == 1
            yield f"{name} and {base} cannot be compared: {who} do{'es' if one else ''} not reach it"


def _beside(found: Saving) -> str:
    parts = [f"{found.pairs} pairs of equal seed"] if found.pairs > 1 else []
    parts += [] if found.pairs else ["no seed in common: means"]
    if found.left_out:
        several, what = found.left_out > 1, "pair" if found.pairs else "run"
        parts.append(
            f"{found.left_out} {f'{what}s do' if several else f'{what} does'} not reach it"
        )
    return f" ({'; '.join(parts)})" if parts else ""


def _arms(comparison: Comparison) -> Block:
    rows = tuple(
        (
            arm.name,
            str(len(arm.runs)),
            ", ".join(NONE if seed is None else str(seed) for seed in arm.seeds),
            ", ".join(run.path.name for run in arm.runs),
        )
        for arm in comparison.arms
    )
    note = "below: mean ± standard deviation over runs; n= where not all of them have a value"
    return Block("groups", ("", "runs", "seeds", "folders"), rows, (note,), numbers=False)


def _cell(metric: str, cell: Cell, runs: int) -> str:
    if cell.mean is None:
        return "nan" if cell.not_finite else NONE
    deviation = "" if cell.deviation is None else f" ±{metric_text(metric, cell.deviation)}"
    few = f" n={cell.runs}" if cell.runs < runs else ""
    return f"{metric_text(metric, cell.mean)}{deviation}{few}"


def _to_loss(comparison: Comparison, goal: ToLoss, names: Sequence[str]) -> Block:
    unit = unit_text(comparison.unit)
    rows, notes = [], []
    for name, arm, reached in zip(names, comparison.arms, goal.reached, strict=True):
        for run, found in zip(arm.runs, reached, strict=True):
            who = name if len(arm.runs) == 1 else f"{name}: {run.path.name}"
            rows.append((who, *_reached(found)))
            if found is not None and found.left_at_step is not None:
                notes.append(f"{who} is worse again at step {found.left_at_step:,}")
            if found is not None and found.from_the_start:
                notes.append(f"{who} has it from its first measurement on, maybe before")
    headers = ("", "step", unit, "FLOPs", "active", "wall")
    said = tuple(sentences(goal, names, comparison.unit))
    return Block(
        f"{goal.metric} {goal.target:g} is reached at", headers, tuple(rows), (*said, *notes)
    )


def _reached(found: Reached | None) -> tuple[str, ...]:
    if found is None:
        return ("not reached", NONE, NONE, NONE, NONE)
    at = found.at
    return (
        f"{at['step']:,.0f}",
        si(round(at["tokens"])),
        flops_text(at["flops"]),
        duration(at["active_s"]),
        duration(at["wall_s"]),
    )


def _config(comparison: Comparison, names: Sequence[str]) -> Block:
    if not comparison.config:
        return Block("configs", notes=("no key differs",))
    if len(names) <= MOST_COLUMNS:
        rows = [(key, *map(_value, each)) for key, each in comparison.config.items()]
        return Block("configs", ("", *names), tuple(rows), numbers=False)
    rows = []
    for key, each in comparison.config.items():
        by_value: dict[str, list[str]] = {}
        for name, value in zip(names, each, strict=True):
            by_value.setdefault(_value(value), []).append(name)
        rows += [
            ("" if number else key, value, ", ".join(who))
            for number, (value, who) in enumerate(by_value.items())
        ]
    return Block("configs", ("", "value", "of"), tuple(rows), numbers=False)


def _value(value: object) -> str:
    written = NONE if value is None else in_yaml(value)
    return written if len(written) <= _LONGEST_VALUE else f"{written[: _LONGEST_VALUE - 1]}…"
