"""`trainer_state.json` of transformers' Trainer: its log history, and what it says of the end and the best."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from instar.config.errors import ConfigError
from instar.extensions.foreign.records.files import parse_json, read_head, read_text, run_name
from instar.extensions.foreign.records.table import RecordTable, number_of

FILE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,18})")


def find_states(path: Path) -> list[Path]:
    """Return the state at a path: the file, that of a folder, or that of its newest checkpoint."""
    if path.is_file():
        head = read_head(path)
        return [path] if head.lstrip()[:1] == b"{" and b'"log_history"' in head else []
    if (path / FILE).is_file():
        return [path / FILE]
    checkpoints = {
        int(match[1]): folder / FILE
        for folder in path.iterdir()
        if (match := _CHECKPOINT.fullmatch(folder.name)) and (folder / FILE).is_file()
    }
    return [checkpoints[max(checkpoints)]] if checkpoints else []


def read_state(path: Path) -> Iterator[RecordTable]:
    """Yield the run of a state.

    Raises:
        ConfigError: it is not one, or cannot be read.
    """
    try:
        state = parse_json(read_text(path))
    except ValueError as error:
        raise ConfigError.of(f"{path} is not JSON: {error}") from error
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise ConfigError.of(f"{path} has no log_history, as a state of transformers does")
    is_of_checkpoint = _CHECKPOINT.fullmatch(path.absolute().parent.name) is not None
    name = run_name(path.parent.parent if is_of_checkpoint else path, FILE)
    table = RecordTable(name, "transformers", "transformers' trainer_state.json")
    for entry in history:
        values = dict(entry) if isinstance(entry, dict) else {}
        table.add(values.pop("step", None), values)
    _read_totals(table, state, history)
    _read_best(table, state, history)
    yield table


def _read_totals(table: RecordTable, state: Mapping[str, Any], history: list[Any]) -> None:
    step, max_steps = (number_of(state.get(key)) for key in ("global_step", "max_steps"))
    if step is not None and max_steps is not None and step < max_steps:
        table.end_reason = f"its record ends at step {step:,.0f} of {max_steps:,.0f}"
    last_entry = history[-1] if history and isinstance(history[-1], dict) else {}
    totals = {
        "flops": state.get("total_flos"),
        "tokens": state.get("num_input_tokens_seen"),
        "wall_s": last_entry.get("train_runtime"),
    }
    for axis, value in totals.items():
        number = number_of(value)
        if number is not None and 0 < number < 1e18 * (1e9 if axis == "flops" else 1):
            table.totals[axis] = int(number) if axis == "tokens" else number


def _read_best(table: RecordTable, state: Mapping[str, Any], history: list[Any]) -> None:
    """Find the metric whose best value the state has, which does not name it, and its direction."""
    best, step = number_of(state.get("best_metric")), state.get("best_global_step")
    evaluations = [
        e for e in history if isinstance(e, dict) and any(k.startswith("eval_") for k in e)
    ]
    at_best = [e for e in evaluations if e.get("step") == step]
    names = [
        k for e in at_best for k, value in e.items() if k.startswith("eval_") and value == best
    ]
    if best is None or not names:
        return
    name = table.best_metric = "eval_loss" if "eval_loss" in names else names[0]
    values = [number for e in evaluations if (number := number_of(e.get(name))) is not None]
    if name != "eval_loss" and any(value != best for value in values):
        table.better[name] = "max" if any(value < best for value in values) else "min"
