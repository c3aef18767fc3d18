"""Commands typed one after another in one process, which says what each came to.

Run with a JSON list of {"folder": …, "argv": […]} on stdin; prints a JSON list of [exit code,
stdout, stderr, heavy modules imported by then, files left behind].
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

HEAVY = ("torch", "matplotlib", "starlette", "transformers")


class Outcome(NamedTuple):
    code: int
    out: str
    err: str
    heavy: list[str]
    new_paths: list[str]


def run_commands(commands: Sequence[tuple[Path, Sequence[str]]]) -> list[Outcome]:
    """What each command came to, typed in its folder; all in one other process."""
    requests = [{"folder": str(folder), "argv": list(argv)} for folder, argv in commands]
    result = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return [Outcome(*fields) for fields in json.loads(result.stdout)]


def _answer(folder: str, argv: Sequence[str]) -> Outcome:
    from instar.cli.main import main

    os.chdir(folder)
    before = {str(path) for path in Path().rglob("*")}
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(argv)
        except Exception:
            code = 1
            traceback.print_exc()
    new_paths = {str(path) for path in Path().rglob("*")} - before
    heavy = [name for name in HEAVY if name in sys.modules]
    return Outcome(code, out.getvalue(), err.getvalue(), heavy, sorted(new_paths))


if __name__ == "__main__":
    json.dump([_answer(**request) for request in json.load(sys.stdin)], sys.stdout)
