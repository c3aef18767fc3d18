"""Forecast as text: the stages of a run, and what changes from one to the next."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import fields

from instar.config.origins import in_yaml
from instar.record.format import bytes_text, scientific, si, sizes_text
from instar.schedule.forecast import UNSEEN_EFFECTS, BranchForecast, Forecast, Stage, Totals
from instar.schedule.settings import Settings

_LABEL = 12
"""The width of a row's label in columns."""

Row = tuple[str, Sequence[str]]
"""A label and its lines."""


def render(forecast: Forecast, notes: Sequence[str] = ()) -> str:
    """Render a forecast in lines of at most 80 columns, with what extensions say of it; rows that an
    operation does not change are not repeated."""
    rows: list[Row] = []
    before: Stage | None = None
    for number, stage in enumerate(forecast.stages, 1):
        rows_before = [] if before is None else _rows(before, forecast.unit, forecast.world_size)
        if len(forecast.stages) > 1:
            rows += _stage_header(number, stage, forecast)
        if before is not None and (changes := _change_texts(before.settings, stage.settings)):
            rows.append(("settings", [", ".join(changes)]))
        rows += [
            row
            for row in _rows(stage, forecast.unit, forecast.world_size)
            if row not in rows_before
        ]
        if len(forecast.stages) > 1:
            rows.append(("", [""]))
        before = stage
    rows += [*_by_strategy(forecast), *_totals(forecast)]
    lines = [line for label, texts in rows for line in wrapped_row(label, texts)]
    return "\n".join([*lines, *filter(None, notes)])


def render_change(before: Stage, after: Stage, unit: str, world_size: int) -> str:
    """Render what an operation changes, in lines of at most 80 columns: settings, shape, memory, cost."""
    changes = _change_texts(before.settings, after.settings)
    rows: list[Row] = [
        ("operation", [f"{after.operation}{f' ({after.label})' if after.label else ''}"]),
        ("skipped", [after.skipped] if after.skipped else []),
        ("settings", [", ".join(changes)] if changes else []),
        ("config", _config_texts(after)),
    ]
    rows_before = _rows(before, unit, world_size)
    rows += [row for row in _rows(after, unit, world_size) if row not in rows_before]
    if len([row for row in rows if row[1]]) == 1:
        name = after.operation.partition(" ")[0]
        rows.append(("", [UNSEEN_EFFECTS.get(name, "nothing changes")]))
    return "\n".join(line for label, texts in rows for line in wrapped_row(label, texts))


def wrapped_row(label: str, texts: Sequence[str]) -> list[str]:
    """Return a row's lines of at most 80 columns."""
    lines = [line for text in texts for line in textwrap.wrap(text, 80 - _LABEL) or [""]]
    return [f"{'' if n else label:<{_LABEL}}{line}".rstrip() for n, line in enumerate(lines)]


def _stage_header(number: int, stage: Stage, forecast: Forecast) -> list[Row]:
    label = f" ({stage.label})" if stage.label else ""
    beginning = "as the run is now" if stage.first_step else "as the config says"
    rows: list[Row] = [
        (f"stage {number}", [f"{stage.operation}{label}" or beginning]),
        ("trigger", [stage.when]),
        ("begins", [_steps(stage, forecast)]),
        ("skipped", [stage.skipped]),
        ("changes", ["nothing" if stage.is_idle else ""]),
        ("config", _config_texts(stage)),
    ]
    return [row for row in rows if any(row[1])]


def _config_texts(stage: Stage) -> list[str]:
    """Describe the keys of the config that an operation changes."""
    return [
        f"{key} {in_yaml(before)} → {in_yaml(after)}"
        for key, (before, after) in stage.config_changes.items()
    ]


def _steps(stage: Stage, forecast: Forecast) -> str:
    first, latest = stage.first_step, stage.latest_step
    if first is None:
        return "not reached" + (f" within {forecast.steps:,} steps" if forecast.steps else "")
    if latest is None:
        return f"at step {first:,} at the earliest, perhaps never"
    at = f"at step {first:,}"
    return at if first == latest else f"{at} at the earliest, {latest:,} at the latest"


_WORDS = {
    "lr": "lr",
    "warmup_iters": "warm-up",
    "lr_decay_iters": "decay ends after",
    "decay_every": "falls every",
    "lr_options": "options of the rate",
    "batch_size": "batch_size",
    "grad_accum": "gradient accumulation",
    "eval_interval": "eval_interval",
    "eval_iters": "eval_iters",
    "context": "context",
    "mixture": "weights of the mixture",
    "frozen": "frozen",
}


def _change_texts(before: Settings, after: Settings) -> list[str]:
    """Describe the settings that an operation changes."""
    lines = [
        f"{_WORDS[name]} {_short(getattr(before, name))} → {_short(getattr(after, name))}"
        for name in (field.name for field in fields(Settings))
        if name in _WORDS and getattr(before, name) != getattr(after, name)
    ]
    if after.rewarm_iters and before.rewarm_iters != after.rewarm_iters:
        lines.append(f"lr rises from 0 again over {after.rewarm_iters:,} steps")
    if after.new_param_warmups and after.new_param_warmups[-1] not in before.new_param_warmups:
        lines.append(
            f"lr of what is new rises from 0 over {after.new_param_warmups[-1].iters:,} steps"
        )
    return lines


def _short(value: object) -> str:
    if isinstance(value, tuple):
        parts = (f"{part[0]} {part[1]}" if isinstance(part, tuple) else str(part) for part in value)
        return ", ".join(parts) or "nothing"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rows(stage: Stage, unit: str, world_size: int) -> list[Row]:
    count, memory = stage.parameters, stage.memory_bytes
    parts = [f"{name} {bytes_text(size)}" for name, size in memory.items() if size]
    settings = stage.settings
    weight = round(settings.global_batch * stage.weight)
    units = "" if unit == "sample" else f" {si(weight)} {unit}s,"
    ranks = f"{world_size} rank" + "s" * (world_size > 1)
    rows: list[Row] = [
        *stage.style,
        ("parameters", [f"{si(count.total)}, {si(count.non_embedding)} without embeddings"]),
        (
            "compute",
            [f"{scientific(stage.flops_per_token)} FLOPs per {unit}, forward and backward"],
        ),
        (
            "memory",
            [
                f"about {bytes_text(sum(memory.values()))} of tensors on each rank:",
                ", ".join(parts),
            ],
        ),
        (
            "step",
            [
                f"{settings.global_batch:,} samples,{units} on {ranks}, "
                f"micro-batches of at most {stage.batch_size:,} samples"
            ],
        ),
    ]
    if stage.steps_per_epoch is not None:
        left_out = f", data.drop_last leaves out {stage.left_out:,}" if stage.left_out else ""
        rows.append(("epoch", [f"{stage.steps_per_epoch:,} steps{left_out}"]))
    return [row for row in rows if any(row[1])]


def _by_strategy(forecast: Forecast) -> list[Row]:
    """Return a table of the memory of a rank under each strategy, in the stage that needs most."""
    memory = max(
        (stage.memory for stage in forecast.stages), key=lambda by: max(m.peak for m in by.values())
    )
    if len(memory) == 1:
        return []
    parts = dict.fromkeys(part for rank in memory.values() for part in rank.step)
    sizes = {part: [rank.step.get(part, 0) for rank in memory.values()] for part in parts}
    lines = {part: row for part, row in sizes.items() if any(row)}
    lines["step"] = [sum(rank.step.values()) for rank in memory.values()]
    if any(rank.growth for rank in memory.values()):
        lines["growth"] = [rank.growth for rank in memory.values()]
    lines["sent / step"] = [rank.sent for rank in memory.values()]
    heads = [f"{name} / {m.shards}" if name == "hsdp" else name for name, m in memory.items()]
    table = {"": heads, **{n: [bytes_text(size) for size in row] for n, row in lines.items()}}
    texts = [f"{n:<12}" + "".join(f"{cell:>12}" for cell in row) for n, row in table.items()]
    return [("strategies", ["memory of a rank:", *texts])]


def _totals(forecast: Forecast) -> list[Row]:
    """Return the rows about the run as a whole."""
    data = "not prepared yet, or a stream: epochs are not known"
    if forecast.dataset_tokens is not None:
        units = f"{si(forecast.dataset_tokens)} {forecast.unit}s, "
        if forecast.unit == "sample" and forecast.dataset_tokens == forecast.samples_per_epoch:
            units = ""
        data = f"{units}{forecast.samples_per_epoch:,} samples"
    sizes = [sizes_text(forecast.splits)] if forecast.splits else []
    drawing = [forecast.drawing] if forecast.drawing else []
    rows: list[Row] = [
        ("data", [data, *sizes, *drawing]),
        ("until", [" or ".join(forecast.until)]),
        ("saves", [", ".join([*forecast.saves, "at the end"])]),
    ]
    if forecast.early is None or forecast.late is None:
        text_lines = ["open: only the clock or the loss ends this run"]
        if any("ep" in text for text in forecast.until) and forecast.dataset_tokens is None:
            text_lines = ["open: how many steps an epoch has is not known yet"]
    elif forecast.early == forecast.late:
        text_lines = [_total(forecast.early, forecast.unit)]
    else:
        text_lines = [
            f"{_total(forecast.early, forecast.unit)} if every operation fires at its earliest step;",
            f"{_total(forecast.late, forecast.unit)} at its latest",
        ]
    branches = [_branch(branch, forecast.unit) for branch in forecast.branches]
    if forecast.weight_remark:
        text_lines.append(f"{forecast.unit}s: {forecast.weight_remark}")
    return [*rows, ("total", text_lines), *([("branches", branches)] if branches else [])]


def _branch(branch: BranchForecast, unit: str) -> str:
    begins = f"at step {branch.first_step:,}"
    if branch.latest_step is None:
        begins += " at the earliest, perhaps never"
    elif branch.latest_step != branch.first_step:
        begins += f" to {branch.latest_step:,}"
    decay = f", the last {branch.decay:,} in decay" if branch.decay else ""
    cost = _total(branch.early, unit) if branch.early else f"{branch.iters:,} steps"
    return f"{branch.name}, {begins}: {cost}{decay}; {si(branch.parameters.total)} parameters"


def _total(totals: Totals, unit: str) -> str:
    epochs = "" if totals.epochs is None else f"{totals.epochs:.2f} epochs, "
    return (
        f"{totals.steps:,} steps, {si(totals.tokens)} {unit}s, {epochs}"
        f"{scientific(totals.flops)} FLOPs"
    )
