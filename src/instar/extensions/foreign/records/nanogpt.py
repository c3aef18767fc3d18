"""What nanoGPT's `train.py` prints: the loss of iterations, and that of evaluations on both splits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from instar.extensions.foreign.records.files import read_head, read_lines
from instar.extensions.foreign.records.table import RecordTable

_NUMBER = r"(-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|nan|inf))"
_EVALUATION = re.compile(rf"\bstep (\d{{1,18}}): train loss {_NUMBER}, val loss {_NUMBER}")
_ITERATION = re.compile(
    rf"\biter (\d{{1,18}}): loss {_NUMBER}, time {_NUMBER}ms(?:, mfu {_NUMBER}%)?"
)
_TOKENS = re.compile(r"tokens per iteration will be: ([\d,]{1,24})")


def find_outputs(path: Path) -> list[Path]:
    """Return the file, if its beginning has a line of a loss."""
    text = read_head(path).decode("utf-8", "replace")
    return [path] if _EVALUATION.search(text) or _ITERATION.search(text) else []


def read_output(path: Path) -> Iterator[RecordTable]:
    """Yield the run whose output a file has.

    Raises:
        ConfigError: it cannot be read.
    """
    table = RecordTable(path.stem, "nanogpt", "nanoGPT's output")
    tokens_per_step, early_mfu = 0, 0
    for line in read_lines(path):
        if match := _TOKENS.search(line):
            tokens_per_step = int(match[1].replace(",", "") or 0)
        elif match := _EVALUATION.search(line):
            step = int(match[1])
            values = {"train/loss": float(match[2]), "val/loss": float(match[3])}
            table.add(step, values | _tokens(step, tokens_per_step))
        elif match := _ITERATION.search(line):
            step = int(match[1])
            values = {"loss": float(match[2]), "time_ms": float(match[3])}
            mfu = float(match[4] or "nan")
            early_mfu += mfu < 0
            if mfu >= 0:
                values["mfu"] = mfu / 100
            table.add(step, values | _tokens(step, tokens_per_step))
    if early_mfu:
        table.remarks.append(f"mfu left out where nanoGPT had not measured it yet: {early_mfu:,}")
    yield table


def _tokens(step: int, tokens_per_step: int) -> dict[str, float]:
    """Return the tokens that were trained on before an iteration of this number."""
    return {"tokens": step * tokens_per_step} if tokens_per_step else {}
