"""Instar as a person starts it: a process with its own group, listened to line by line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from forks import INSTAR, LIMIT_S, children_as_ranks, forks

INSTALLED = [sys.executable, "-m", "instar.cli.main", "train"]


class Started:
    """A running command whose stderr is read as it comes."""

    def __init__(self, command: Sequence[str]) -> None:
        self.stderr = ""
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def wait_for(self, pattern: str) -> None:
        """Read until a line matches; fail if the output ends before."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr += line
            if re.search(pattern, line):
                return
        raise AssertionError(f"ended without {pattern!r}:\n{self.stderr}")

    def interrupt(self) -> None:
        """What a terminal does at Ctrl-C: SIGINT to the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self, *, group: bool) -> None:
        """SIGTERM, as from a scheduler: to the process that was started, or to its whole group."""
        (os.killpg if group else os.kill)(self.process.pid, signal.SIGTERM)

    def finish(self, code: int) -> str:
        """Wait for the end, which must be with this code; all of stderr."""
        try:
            _, tail = self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        self.stderr += tail
        assert self.process.returncode == code, self.stderr
        return self.stderr


def start_instar(
    *arguments: object, run_dir: Path | None = None, command: Sequence[object] = ()
) -> Started:
    """`instar train ARGUMENTS` (or `command ARGUMENTS`) in the run directory given; it and its ranks
    are forked from a process that has imported everything, unless the command is `INSTALLED`."""
    base = map(str, command or [forks().command, "train"])
    place = ["--set", f"record.run_dir={run_dir}"] if run_dir else []
    return Started([*base, *map(str, arguments), *place])


def run_ranks(count: int, place: Path, *words: object) -> None:
    """`instar WORDS` on so many ranks, which end well: without a launcher, and without the seconds
    in which new interpreters import torch. Paths are absolute; output goes to `place`."""
    argv = [str(word) for word in words]
    ranks = children_as_ranks(forks(), count, INSTAR, argv, place=place)
    codes = [rank.finish() for rank in ranks]
    assert codes == [0] * count, "\n".join(rank.output() for rank in ranks)
