"""Formats a comparison as text or as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from instar.config.origins import plain_text
from instar.logs.query.alignment import LossReached, Saving, saving_text
from instar.logs.query.compare import Cell, Comparison, ToLoss
from instar.logs.query.groups import RunGroup, short_values
from instar.logs.text.stdout import align_columns, markdown_table, wrap_line
from instar.logs.text.values import NONE, metric_value_text
from instar.record.format import duration, scientific, si, unit_text

MOST_COLUMNS = 4
"""groups that have a column each in the table of config differences"""


@dataclass(frozen=True)
class Block:
    """A titled table with notes, or notes alone."""

    title: str
    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    numbers: bool = True
    """whether all columns but the first are numbers"""


def comparison_blocks(comparison: Comparison) -> Iterator[Block]:
    """Yield the tables of a comparison in the order in which they are printed."""
    names = [group.name for group in comparison.groups]
    if comparison.warnings:
        yield Block("warning", notes=comparison.warnings)
    if any(len(group.runs) > 1 for group in comparison.groups):
        yield _groups(comparison)
    for metric, cells in comparison.metrics.items():
        yield Block(
            metric,
            ("", *(place.text(comparison.unit) for place in comparison.places)),
            tuple(
                (group.name, *(_cell(metric, cell, len(group.runs)) for cell in row))
                for group, row in zip(comparison.groups, cells, strict=True)
            ),
        )
    if comparison.results and any(len(group.runs) > 1 for group in comparison.groups):
        yield _results(comparison, names)
    if comparison.to_loss is not None:
        yield _to_loss(comparison, comparison.to_loss, names)
    if len(names) > 1:
        yield _config(comparison, names)


def comparison_text(comparison: Comparison, width: int | None = None) -> list[str]:
    """Return aligned lines of at most `width` columns where possible."""
    lines: list[str] = []
    for block in comparison_blocks(comparison):
        lines += ["", block.title] if lines else [block.title]
        if block.rows:
            right = range(1, len(block.headers)) if block.numbers else ()
            lines += align_columns((block.headers, *block.rows), right, width)
        lines += [line for note in block.notes for line in wrap_line(f"  {note}", width)]
    return lines


def comparison_markdown(comparison: Comparison) -> list[str]:
    """Return Markdown sections and tables."""
    lines = ["# Comparison"]
    for block in comparison_blocks(comparison):
        lines += ["", f"## {block.title}", ""]
        if block.rows:
            right = range(1, len(block.headers)) if block.numbers else ()
            rows = [[cell.replace("|", "\\|") for cell in row] for row in block.rows]
            lines += markdown_table(block.headers, rows, right=list(right))
        lines += ["", *(f"- {note}" for note in block.notes)] if block.notes else []
    return lines


def sentences(goal: ToLoss, names: Sequence[str], unit: str, and_fold: str = "") -> Iterator[str]:
    """Yield e.g. `b reaches val/loss 3 with 31% fewer FLOPs, 12% fewer tokens than a`.

    Args:
        and_fold: what runs that are paired have in common besides the seed.
    """
    base = names[0]
    axes = (
        ("flops", "FLOPs"),
        ("tokens", f"{unit}s"),
        ("step", "steps"),
        ("active_s", "active time"),
    )
    for name, by_axis, losses_reached in zip(
        names[1:], goal.savings, goal.reached[1:], strict=True
    ):
        savings = [(share, what) for axis, what in axes if (share := by_axis[axis]) is not None]
        if savings:
            words = ", ".join(saving_text(share, what) for share, what in savings)
            note = _pairing_note(
                max((share for share, _ in savings), key=lambda share: share.pairs), and_fold
            )
            yield f"{name} reaches {goal.metric} {goal.target:g} with {words} than {base}{note}"
        else:
            missing = [
                label
                for label, side_reached in ((base, goal.reached[0]), (name, losses_reached))
                if not any(side_reached)
            ]
            runs_missing = " and ".join(missing)
            verb = "does" if len(missing) == 1 else "do"
            reached = (*goal.reached[0], *losses_reached)
            at_start = any(loss is not None and not loss.at["step"] for loss in reached)
            why = (
                f"{runs_missing} {verb} not reach it"
                if runs_missing
                else "it is reached at step 0 already: compare at a better value"
                if at_start
                else f"no pair of runs with equal seed{and_fold} reaches it"
            )
            yield f"{name} and {base} cannot be compared: {why}"


def _pairing_note(share: Saving, and_fold: str) -> str:
    parts = [f"{share.pairs} pairs of equal seed{and_fold}"] if share.pairs > 1 else []
    parts += [] if share.pairs else [f"no seed{and_fold} in common: means"]
    if share.left_out:
        is_plural, what = share.left_out > 1, "pair" if share.pairs else "run"
        parts.append(
            f"{share.left_out} {f'{what}s do' if is_plural else f'{what} does'} not reach it, or at step 0"
        )
    return f" ({'; '.join(parts)})" if parts else ""


def _groups(comparison: Comparison) -> Block:
    has_folds = _has_folds(comparison)
    rows = tuple(
        (
            group.name,
            str(len(group.runs)),
            ", ".join(NONE if seed is None else str(seed) for seed in group.seeds),
            *([_folds(group)] if has_folds else []),
            ", ".join(run.path.name for run in group.runs),
        )
        for group in comparison.groups
    )
    note = "below: mean ± standard deviation over runs; n= where not all of them have a value"
    headers = ("", "runs", "seeds", *(["folds"] if has_folds else []), "folders")
    return Block("groups", headers, rows, (note,), numbers=False)


def _has_folds(comparison: Comparison) -> bool:
    return any(fold is not None for group in comparison.groups for fold in group.folds)


def _folds(group: RunGroup) -> str:
    return ", ".join(NONE if fold is None else str(fold) for fold in group.folds)


def _results(comparison: Comparison, names: Sequence[str]) -> Block:
    """Return the table of best values and of tests: a row for each metric, a column for each group."""
    rows = tuple(
        (
            name,
            *(
                _cell(name.removeprefix("best "), cell, len(group.runs))
                for group, cell in zip(comparison.groups, cells, strict=True)
            ),
        )
        for name, cells in comparison.results.items()
    )
    return Block("best and test", ("", *names), rows)


def _cell(metric: str, cell: Cell, runs: int) -> str:
    if cell.mean is None:
        return "nan" if cell.not_finite else NONE
    deviation = "" if cell.deviation is None else f" ±{metric_value_text(metric, cell.deviation)}"
    count_note = f" n={cell.runs}" if cell.runs < runs else ""
    return f"{metric_value_text(metric, cell.mean)}{deviation}{count_note}"


def _to_loss(comparison: Comparison, goal: ToLoss, names: Sequence[str]) -> Block:
    unit = unit_text(comparison.unit)
    rows, notes = [], []
    for name, group, losses_reached in zip(names, comparison.groups, goal.reached, strict=True):
        for run, run_reached in zip(group.runs, losses_reached, strict=True):
            label = name if len(group.runs) == 1 else f"{name}: {run.path.name}"
            rows.append((label, *_reached_cells(run_reached)))
            if run_reached is not None and run_reached.left_at_step is not None:
                notes.append(f"{label} is worse again at step {run_reached.left_at_step:,}")
            if run_reached is not None and run_reached.from_the_start:
                notes.append(f"{label} reaches it at its first measurement or earlier")
            if run_reached is not None and run_reached.decays_for:
                notes.append(
                    f"{label} reaches it while its learning rate falls, {run_reached.decays_for:.0%} before its "
                    "end; ended there, it would be lower: compare runs at their ends"
                )
    headers = ("", "step", unit, "FLOPs", "active", "wall")
    and_fold = " and fold" if _has_folds(comparison) else ""
    notes = [*sentences(goal, names, comparison.unit, and_fold), *notes]
    return Block(f"{goal.metric} {goal.target:g} is reached at", headers, tuple(rows), tuple(notes))


def _reached_cells(loss_reached: LossReached | None) -> tuple[str, ...]:
    if loss_reached is None:
        return ("not reached", NONE, NONE, NONE, NONE)
    at = loss_reached.at
    texts = {
        "tokens": si(round(at["tokens"])),
        "flops": scientific(at["flops"]),
        "active_s": duration(at["active_s"]),
        "wall_s": duration(at["wall_s"]),
    }
    unknown = (axis for axis in texts if at["step"] and not at[axis])  # of an imported run
    texts |= dict.fromkeys(unknown, NONE)
    return (f"{at['step']:,.0f}", *texts.values())


def _config(comparison: Comparison, names: Sequence[str]) -> Block:
    if not comparison.config:
        return Block("configs", notes=("no key differs",))
    if len(names) <= MOST_COLUMNS:
        rows = [(key, *_short(key, values)) for key, values in comparison.config.items()]
        return Block("configs", ("", *names), tuple(rows), numbers=False)
    rows = []
    for key, group_values in comparison.config.items():
        by_value: dict[str, tuple[object, list[str]]] = {}
        for name, value in zip(names, group_values, strict=True):
            by_value.setdefault(repr(value), (value, []))[1].append(name)
        short = _short(key, [value for value, _ in by_value.values()])
        rows += [
            ("" if number else key, ", ".join(runs), text)
            for number, (text, (_, runs)) in enumerate(zip(short, by_value.values(), strict=True))
        ]
    return Block("configs", ("", "runs", "value"), tuple(rows), numbers=False)


def _short(key: str, values: Sequence[object]) -> list[str]:
    texts = [NONE if value is None else plain_text(value) for value in values]
    return short_values(key, values, texts)
