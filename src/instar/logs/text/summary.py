"""Formats summaries as text and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from instar.extensions import layer_titles
from instar.logs.query.summary import MetricValue, Summary
from instar.logs.text.stdout import align_columns, indent_text, markdown_table, wrap_line
from instar.logs.text.values import NONE, best_text, date, metric_value_text
from instar.record.events import OperationEvent
from instar.record.format import (
    bytes_text,
    duration,
    loss,
    operation_lines,
    scientific,
    si,
    unit_text,
)

_LABEL = 13
_GROUPS = ("grad_norm/", "update_ratio/")
"""metrics of single layers, omitted from a summary, as are those of extensions"""

FAMILY_HEADS = ("run", "branch at", "state", "step", "best val")


def with_error(name: str, value: MetricValue) -> str:
    error = "" if value.error is None else f" ±{metric_value_text(name, value.error)}"
    return metric_value_text(name, value.value) + error


def state_text(summary: Summary) -> str:
    return f"{summary.state}: {summary.reason}" if summary.reason else summary.state


def folder(summary: Summary) -> str:
    """Return the name of a run's folder, which is unique among the runs beside it."""
    return Path(summary.path).name or summary.path


def best_held_out(summary: Summary) -> tuple[str, MetricValue] | None:
    """Return the best value of the metric that `checkpoints/best` follows, else of the first
    held-out metric."""
    held_out = [name for name in summary.best if name.startswith("val/")]
    name = (
        summary.best_metric if summary.best_metric in summary.best else next(iter(held_out), None)
    )
    return None if name is None else (name, summary.best[name])


def page(summary: Summary, width: int) -> list[str]:
    """Return a summary as lines of at most `width` columns; words are not split."""
    lines = [folder(summary)]
    for label, parts in facts(summary):
        lines += _laid_out(label, parts, width)
    if rows := list(metric_rows(summary)):
        lines += [
            "",
            *align_columns([("metric", "last", "at", "best", "at"), *rows], range(1, 5), width),
        ]
    if summary.operations:
        lines += ["", "operations"]
        for line in (
            line for operation in summary.operations for line in operation_lines(operation)
        ):
            lines += wrap_line(line, width, " " * 9)
    if summary.family:
        lines += [
            "",
            "family",
            *(
                f"  {line}"
                for line in align_columns([FAMILY_HEADS, *family_rows(summary)], (3,), width)
            ),
        ]
    for label, messages in (
        ("alerts", summary.alerts),
        ("warnings", summary.warnings),
        ("not readable", summary.faults),
    ):
        if messages:
            lines += ["", label]
            lines += [line for text in messages for line in wrap_line(f"  {text}", width)]
    return lines


def facts(summary: Summary) -> Iterator[tuple[str, list[str]]]:
    """Yield everything but the metrics: a label and the parts of its line."""
    unit = unit_text(summary.unit)
    ranks = [f"{summary.world_size} ranks"] if summary.world_size > 1 else []
    size = f" {si(summary.parameters)}" if summary.parameters else ""
    process = [f"process {summary.process}"] if summary.process else []
    yield "state", [state_text(summary), *process]
    if summary.imported_from:
        yield "imported", [f"from {summary.imported_from}"]
    if summary.go_on:
        yield "resume with", [summary.go_on]
    yield "where", [summary.path]
    if model := [part for part in (f"{summary.model}{size}", summary.devices, *ranks) if part]:
        yield "model", model
    if summary.started:
        count = summary.segments - 1
        resumes = [f"resumed {count} time{'' if count == 1 else 's'}"] if count > 0 else []
        yield "started", [date(summary.started), *resumes]
        yield "last line", [date(summary.seen)]
    tokens = [(summary.tokens, f"{si(summary.tokens)} {unit}")] if summary.unit != "sample" else []
    amounts = [
        (summary.samples, f"{summary.samples:,} samples"),
        *tokens,
        (summary.epoch, f"epoch {summary.epoch:.2f}"),
        (summary.flops, f"{scientific(summary.flops)} FLOPs"),
    ]
    yield "reached", [f"step {summary.step:,}", *_texts_of_amounts(summary, amounts)]
    rate = summary.tokens_per_s
    pace = [] if rate is None else [f"{si(rate)} {unit}/s"]
    times = [
        (summary.active_s, f"{duration(summary.active_s)} active"),
        (summary.wall_s, f"{duration(summary.wall_s)} wall"),
    ]
    if clocks := [*_texts_of_amounts(summary, times), *pace]:
        yield "time", clocks
    if total := sum(summary.drawn.values()):
        shares = ((name, count / total) for name, count in summary.drawn.items())
        yield "drawn", [f"{name} {share:.1%}" for name, share in shares]
    if summary.memory_peak_bytes is not None:
        yield "peak memory", [bytes_text(summary.memory_peak_bytes)]
    if summary.anew:
        yield "evaluations", [f"comparable {summary.anew[-1]}"]
    if summary.skipped_steps:
        yield "skipped", [f"{summary.skipped_steps:,} steps"]
    if summary.checkpoints:
        yield (
            "checkpoints",
            [
                f"{checkpoint.name} ({', '.join(checkpoint.pointers)})"
                if checkpoint.pointers
                else checkpoint.name
                for checkpoint in summary.checkpoints
            ],
        )


def _texts_of_amounts(summary: Summary, amounts: Sequence[tuple[float, str]]) -> list[str]:
    """Return the texts of amounts; of an imported run those that are not 0, which stands for unknown."""
    return [text for amount, text in amounts if amount or not summary.imported_from]


def family_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Return a row for each run of a family, as a tree."""
    return [
        (
            indent_text(member.name, member.depth),
            "" if member.branched_at is None else f"step {member.branched_at:,}",
            member.state,
            NONE if member.step is None else f"{member.step:,}",
            best_text(member.best_metric, member.best),
        )
        for member in summary.family
    ]


def metric_rows(summary: Summary) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield metric, last value, its step, best value, its step."""
    for name, last in summary.last.items():
        if name.startswith((*_GROUPS, *layer_titles())):
            continue
        best = summary.best.get(name)
        yield (
            name,
            with_error(name, last),
            f"{last.step:,}",
            "" if best is None else metric_value_text(name, best.value),
            "" if best is None else f"{best.step:,}",
        )


def one_lines(summaries: Sequence[Summary]) -> list[str]:
    """Return one line for each run, with the same fields in the same order; `-` for no value.

    `finished  demo-e5s6m  step 200  486k tok  loss 3.801  best val 4.2071 at 200  20.9k tok/s
    23.2s active  2 operations`, and the reason if the run was stopped or crashed.
    """
    return align_columns([_line_cells(summary) for summary in summaries]) if summaries else []


def _line_cells(summary: Summary) -> list[str]:
    unit = unit_text(summary.unit)
    last, best = summary.last.get("loss"), best_held_out(summary)
    rate = NONE if summary.tokens_per_s is None else si(summary.tokens_per_s)
    name = "val" if best is None or best[0] == "val/loss" else best[0]
    value, at = (NONE, NONE) if best is None else (loss(best[1].value, 4), f"{best[1].step:,}")
    count = len(summary.operations)
    return [
        summary.state,
        folder(summary),
        f"step {summary.step:,}",
        f"{_amount(summary, summary.tokens, si)} {unit}",
        f"loss {NONE if last is None else loss(last.value)}",
        f"best {name} {value} at {at}",
        f"{rate} {unit}/s",
        f"{_amount(summary, summary.active_s, duration)} active",
        f"{count} operation{'' if count == 1 else 's'}",
        _remark(summary),
    ]


def _amount(summary: Summary, amount: float, text: Callable[[float], str]) -> str:
    """Return the text of an amount; `-` for 0 of an imported run, which stands for unknown."""
    return text(amount) if amount or not summary.imported_from else NONE


def _remark(summary: Summary) -> str:
    """Return why a run was stopped or crashed, or what it was imported from; else nothing."""
    if summary.imported_from:
        return f"imported from {summary.imported_from}"
    return summary.reason.partition("\n")[0] if summary.state in ("stopped", "crashed") else ""


def summary_markdown(summaries: Sequence[Summary]) -> list[str]:
    """Return Markdown: one table for several runs, a page with sections for one."""
    if len(summaries) != 1:
        return _markdown_of_many(summaries)
    (summary,) = summaries
    lines = [f"# {_md(folder(summary))}", ""]
    rows = [(label, _md(", ".join(parts))) for label, parts in facts(summary)]
    lines += markdown_table(("", ""), rows)
    if metrics := list(metric_rows(summary)):
        head = ("metric", "last", "at step", "best", "at step")
        lines += ["", "## Metrics", "", *markdown_table(head, metrics, right=(1, 2, 3, 4))]
    if summary.family:
        family = [(_md(row[0]), *row[1:]) for row in family_rows(summary)]
        lines += ["", "## Family", "", *markdown_table(FAMILY_HEADS, family, right=(3, 4))]
    if summary.operations:
        lines += ["", "## Operations", "", *markdown_table(*_operation_table(summary.operations))]
    for title, messages in (
        ("Alerts", summary.alerts),
        ("Warnings", summary.warnings),
        ("Not readable", summary.faults),
    ):
        if messages:
            lines += ["", f"## {title}", "", *(f"- {_md(text)}" for text in messages)]
    return lines


def _markdown_of_many(summaries: Sequence[Summary]) -> list[str]:
    head = ("run", "state", "step", "tokens", "loss", "best", "at", "per s", "active", "operations")
    rows = []
    for summary in summaries:
        unit = unit_text(summary.unit)
        last, best = summary.last.get("loss"), best_held_out(summary)
        rate = NONE if summary.tokens_per_s is None else f"{si(summary.tokens_per_s)} {unit}"
        origin = f", imported from {summary.imported_from}" if summary.imported_from else ""
        rows.append(
            (
                _md(folder(summary)),
                _md(f"{summary.state}{origin}"),
                f"{summary.step:,}",
                f"{_amount(summary, summary.tokens, si)} {unit}",
                NONE if last is None else loss(last.value),
                NONE if best is None else f"{_md(best[0])} {loss(best[1].value, 4)}",
                NONE if best is None else f"{best[1].step:,}",
                rate,
                _amount(summary, summary.active_s, duration),
                str(len(summary.operations)),
            )
        )
    return markdown_table(head, rows, right=(2, 3, 4, 6, 7, 8, 9))


def _operation_table(
    operations: Sequence[OperationEvent],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows: list[tuple[str, ...]] = [
        (
            f"{o.step:,}",
            _md(f"{o.verb} {o.name} {o.change}".rstrip()),
            _md(o.reason),
            _md(", ".join([o.preserves, *o.notes]).lstrip(", ")),
        )
        for o in operations
    ]
    return ("step", "operation", "reason", "effect"), rows


def _md(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _laid_out(label: str, parts: Sequence[str], width: int) -> list[str]:
    """Return lines `label        part, part,`, wrapped at `width` between parts."""
    lines, line = [], label.ljust(_LABEL)
    for number, part in enumerate(parts):
        more = part + ("," if number + 1 < len(parts) else "")
        if len(line) > _LABEL and len(line) + 1 + len(more) > width:
            lines.append(line)
            line = " " * _LABEL
        line += f" {more}" if len(line) > _LABEL else more
    return [*lines, line]
