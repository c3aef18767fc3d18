"""Text for people: numbers, sizes, durations and events as lines."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from instar.config.errors import shorten_text, visible
from instar.record.events import (
    Asked,
    BeginsAnew,
    Eval,
    OperationEvent,
    Placed,
    RunFinished,
    RunStarted,
    Saved,
    Train,
)

_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_INDENT = " " * 9
_ASCII = str.maketrans(
    {
        "×": "x",
        "→": "->",
        "↓": "v",
        "✓": "ok",
        "Δ": "d",
        "±": "+-",
        "≤": "<=",
        "≥": ">=",
        "·": "*",
        "…": "...",
        "−": "-",
        "–": "-",
        "─": "-",
        "━": "=",
        "│": "|",
        "‖": "|",
        "ε": "eps",
        "θ": "theta",
        "β": "beta",
        "√": "sqrt ",
        "²": "^2",
        "•": "*",
        "�": "?",
    }
)
TOK = "tok"
_BAR = 20
"""Columns of a progress bar."""


def si(number: float) -> str:
    """Format three significant digits and a scale: 124_000_000 → `124M`, 1_020_000 → `1.02M`."""
    if not math.isfinite(number):
        return str(number)
    if abs(number) < 999.5:
        return (
            f"{number:.0f}" if number == round(number) or abs(number) >= 99.5 else f"{number:.2g}"
        )
    size, scale = next((s for s in reversed(_SCALES) if abs(number) < 999.5 * s[0]), _SCALES[0])
    mantissa = number / size
    decimals = 2 if abs(mantissa) < 9.995 else 1 if abs(mantissa) < 99.95 else 0
    return f"{mantissa:.{decimals}f}{scale}"


def duration(seconds: float) -> str:
    """Format seconds: `0.42s`, `8.1s`, `42s`, `5m03`, `1h22`, `3d04h`; `?` if invalid."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 59.5:
        decimals = 2 if seconds < 0.995 else 1 if seconds < 9.95 else 0
        return f"{seconds:.{decimals}f}s"
    if seconds < 3599.5:
        minutes, remainder = divmod(round(seconds), 60)
        return f"{minutes}m{remainder:02d}"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days}d{hours:02d}h"


def unit_text(unit: str) -> str:
    """Return the short name of what is counted: `tok`, `graphs`."""
    return TOK if unit == "token" else f"{unit}s"


def loss(value: float, decimals: int = 3) -> str:
    """Format a loss with `decimals`, or with an exponent from 1e4 on and where they would show none of its digits."""
    is_plain = value == 0 or not (abs(value) >= 1e4 or abs(value) < 10.0**-decimals)
    return f"{value:.{decimals}f}" if is_plain else f"{value:.2e}"


def scientific(value: float, decimals: int = 1) -> str:
    """Format a number with an exponent that is not padded: 3e-4 → `3.0e-4`, 3.4e15 → `3.4e15`."""
    mantissa, mark, exponent = f"{value:.{decimals}e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else mantissa


def percent(share: float) -> str:
    return f"{share:.0%}" if math.isfinite(share) else str(share)


def train_line(
    event: Train, *, eta_s: float | None = None, width: int | None = None, unit: str = TOK
) -> str:
    """`  1,000   524M tok  loss 3.912  lr 3.0e-4  gn 0.81  1.02M tok/s  mfu 41%  eta 1h22`.

    Parts that do not fit into `width` columns are left out, the least important first.
    """
    parts = [(0, f"loss {loss(event.loss)}")]
    if event.tokens:
        parts.insert(0, (3, f"{si(event.tokens):>5} {unit}"))
    if event.lr is not None:
        parts.append((4, f"lr {scientific(event.lr)}"))
    if event.grad_norm is not None:
        parts.append((5, f"gn {loss(event.grad_norm, 2)}"))
    if event.tokens_per_s is not None:
        parts.append((2, f"{si(event.tokens_per_s)} {unit}/s"))
    if event.mfu is not None:
        parts.append((6, f"mfu {percent(event.mfu)}"))
    if eta_s is not None:
        parts.append((1, f"eta {duration(eta_s)}"))
    return _fit(step_text(event), parts, width)


def eval_line(event: Eval, *, width: int | None = None, unit: str = TOK) -> str:
    """`  1,000   524M tok  val 3.4102  ±0.0031  best  4.2s`.

    `best` alone means the loss if `checkpoints/best` follows it; other metrics are named.
    """
    parts = [(0, f"{event.split} {loss(event.loss, 4)}")]
    if event.tokens:
        parts.insert(0, (3, f"{si(event.tokens):>5} {unit}"))
    if event.standard_error is not None:
        parts.append((2, f"±{loss(event.standard_error, 4)}"))
    for name, value in event.extra.items():
        if name.endswith("/loss"):
            continue  # a part of the loss
        error = f" ±{event.errors[name]:.2g}" if name in event.errors else ""
        parts.append((2, f"{name} {value:.4g}{error}"))
    if event.best or event.best_of:
        only_loss = event.best and event.best_of in ((), ("loss",))
        parts.append((1, "best" if only_loss else f"best {', '.join(event.best_of)}"))
    if event.seconds is not None:
        parts.append((4, duration(event.seconds)))
    return _fit(step_text(event), parts, width)


def begins_anew_line(event: BeginsAnew) -> str:
    """`    100 evaluations from here on are not comparable with earlier ones (evaluated samples 1 → 90): …`."""
    return (
        f"{step_text(event)} evaluations from here on are not comparable with earlier ones "
        f"({', '.join(event.reasons)}): best values, early stopping, plateaus and triggers begin anew"
    )


def asked_text(event: Asked) -> str:
    """Return `    100 root asked for widen_mlp 1024: waits: at step 5,000 (3f0c…)`."""
    value = "" if event.value is None else f" {shorten_text(visible(str(event.value)), 60)}"
    what = f"asked for {event.operation}" if event.outcome != "cancelled" else event.operation
    return (
        f"{step_text(event)} {visible(event.by) or 'somebody'} {what}{value}: {event.outcome}"
        f"{f': {visible(event.reason)}' if event.reason else ''} ({event.id})"
    )


def confusion_lines(target: str, matrix: Sequence[Sequence[int]]) -> list[str]:
    """Return a table with a row for each true class and a column for each predicted class.

    ```
    kind: true ↓ predicted →      0      1
                           0    196      4
                           1      0    200
    ```
    """
    classes = range(len(matrix))
    counts = [len(f"{count:,}") for row in matrix for count in row]
    width = max([len(f"{len(matrix) - 1}"), *counts]) + 2
    head = f"{target}: true ↓ predicted →"
    rows = [
        [str(n), *(f"{count:,}" for count in row)] for n, row in zip(classes, matrix, strict=True)
    ]
    return [
        head + "".join(f"{n:>{width}}" for n in classes),
        *(f"{n:>{len(head)}}" + "".join(f"{c:>{width}}" for c in cells) for n, *cells in rows),
    ]


def operation_lines(event: OperationEvent) -> list[str]:
    """Return a line with the operation and its reason, and one with the measured effect, if any.

    ```
      2,000 GROW widen_mlp 2048→3072 (val 3.41 < 3.50)  124M→203M  optimizer mapped
             val 3.4102 → 3.4102  max|Δlogit| 2.0e-6  exact ✓
    ```
    """
    what = f"{event.name} {event.change}" if event.change else event.name
    reason = f" ({event.reason})" if event.reason else ""
    lines = ["  ".join([f"{step_text(event)} {event.verb} {what}{reason}", *event.notes])]
    proof, parts = event.proof, []
    if "val_before" in proof and "val_after" in proof:
        parts.append(f"val {loss(proof['val_before'], 4)} → {loss(proof['val_after'], 4)}")
    if "max_logit_diff" in proof:
        parts.append(f"max|Δlogit| {scientific(proof['max_logit_diff'])}")
    if event.preserves:
        parts.append(f"{event.preserves} ✓" if event.preserves == "exact" else event.preserves)
    return lines + ([_INDENT + "  ".join(parts)] if parts else [])


def saved_line(event: Saved) -> str:
    parts = [f"{step_text(event)}  saved {event.path}"]
    if event.size_bytes is not None:
        parts.append(f"{si(event.size_bytes)}B")
    if event.seconds is not None:
        parts.append(duration(event.seconds))
    return "  ".join(parts)


def header_line(event: RunStarted, where: Path) -> str:
    """`run r7f3a  12L/768d 124M  4×H200 DDP  → runs/grow-r7f3a`."""
    model = f"{event.model} {si(event.parameters)}".strip() if event.parameters else event.model
    parts = [f"run {event.run_id}", model, event.devices]
    if event.step:
        parts.append(f"from step {event.step:,}")
    if event.imported_from:
        parts.append(f"imported from {event.imported_from}")
    return "  ".join([part for part in parts if part] + [f"→ {where}"])


def interval_text(count: int, unit: str) -> str:
    """`every 1,000 steps`, or `every epoch`; the unit is in the plural."""
    return f"every {unit.removesuffix('s')}" if count == 1 else f"every {count:,} {unit}"


def data_lines(splits: Mapping[str, int | None], drawing: str = "") -> list[str]:
    """Return lines on the samples of a run: those of each split, and how training samples are drawn."""
    lines = [sizes_text(splits)] if splits else []
    return [f"data  {line}" for line in [*lines, *filter(None, [drawing])]]


def sizes_text(splits: Mapping[str, int | None]) -> str:
    """`train 1,800, val 600, test 600 samples`."""
    sizes = [
        f"{name} {'of unknown length' if size is None else f'{size:,}'}"
        for name, size in splits.items()
    ]
    return f"{', '.join(sizes)} samples" if sizes else ""


def finished_line(event: RunFinished, where: Path, stop_reason: str, unit: str = TOK) -> str:
    """`done  2,000 steps  1.54M tok  loss 3.912  best val 3.4102 at 1,750  41m12  …  → runs/…`."""
    parts = [f"stopped: {stop_reason}" if stop_reason else "done", f"{event.step:,} steps"]
    if event.tokens:
        parts.append(f"{si(event.tokens)} {unit}")
    if event.loss is not None:
        parts.append(f"loss {loss(event.loss)}")
    if event.best_metric != "loss" and event.best_value is not None:
        at = f" at {event.best_value_step:,}" if event.best_value_step is not None else ""
        parts.append(f"best {event.best_metric} {event.best_value:.4g}{at}")
    elif event.best_loss is not None:
        at = f" at {event.best_step:,}" if event.best_step is not None else ""
        parts.append(f"best val {loss(event.best_loss, 4)}{at}")
    if event.active_s:
        parts.append(f"{duration(event.active_s)} active")
    if event.tokens_per_s is not None:
        parts.append(f"{si(event.tokens_per_s)} {unit}/s")
    return "  ".join([*parts, f"→ {where}"])


def progress_line(
    doing: str,
    n_done: float,
    total: float | None,
    unit: str,
    seconds: float,
    width: int | None = None,
) -> str:
    """`verifying step-2000  ━━━━━━━━────────────  41%  1.20 GiB of 2.90 GiB  512 MiB/s  3.4s left`;
    without a total `counting corpus  12,300 documents  410 documents/s  30s`.

    Args:
        n_done, total: in `unit`: B for bytes, else a plural.
        seconds: since the work began.
        width: columns of a terminal; None: there is none, so no bar is drawn.
    """
    rate = n_done / seconds if seconds > 0 else 0.0
    speed = (2, f"{bytes_text(rate)}/s" if unit == "B" else f"{si(rate)} {unit}/s")
    if not total:
        parts = [(1, _amount(n_done, unit)), speed] if n_done else []
        parts.append((0, duration(seconds)))
    else:
        share = min(1.0, n_done / total)
        so_far = bytes_text(n_done) if unit == "B" else f"{n_done:,.0f}"
        parts = [(0, percent(share)), (3, f"{so_far} of {_amount(total, unit)}")]
        parts += (
            [speed, (1, f"{duration((total - n_done) / rate)} left")] if 0 < n_done < total else []
        )
        if width is not None:
            full = round(share * _BAR)
            parts.insert(0, (4, "━" * full + "─" * (_BAR - full)))
    if width is None:
        return _fit(doing, parts, None)
    first = min(len(doing), max(width // 3, width - 60))
    line = _fit("x" * first, parts, width - 1)[first:]
    room = width - 1 - len(line)
    return shorten_text(doing, room) + line


def _amount(number: float, unit: str) -> str:
    return bytes_text(number) if unit == "B" else f"{number:,.0f} {unit}"


def encodable(text: str) -> str:
    """Return `text` encodable as UTF-8, which file names need not be."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def encodable_as(text: str, encoding: str | None) -> str:
    """Return `text` as a stream of this encoding can show it, in ASCII if necessary."""
    encoding, text = encoding or "ascii", visible(text)
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return to_ascii(text)
    return text


def to_ascii(text: str) -> str:
    """Return `text` in ASCII: signs are spelled out, others escaped as in JSON and YAML."""
    if text.isascii():
        return text
    return re.sub("[^\x00-\x7f]", lambda match: json.dumps(match[0])[1:-1], text.translate(_ASCII))


def step_text(event: Placed) -> str:
    """Return the step of an event in the width of a column."""
    return f"{event.step:>7,}"


def _fit(first: str, parts: list[tuple[int, str]], width: int | None) -> str:
    """Join `first` and the parts (priority, text) that fit, in order; priority 0 always stays."""
    fitting = list(parts)
    while True:
        line = "  ".join([first, *(text for _, text in fitting)])
        last_part = max(fitting)
        if width is None or len(line) <= width or last_part[0] == 0:
            return line
        fitting.remove(last_part)


def bytes_text(size: float) -> str:
    """Format bytes with three significant digits: 999 B, 1.20 GiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = 0
    while size >= 999.5 and power < len(units) - 1:
        size /= 1024
        power += 1
    digits = max(0, 2 - math.floor(math.log10(max(size, 1)))) if power else 0
    return f"{size:.{digits}f} {units[power]}"
