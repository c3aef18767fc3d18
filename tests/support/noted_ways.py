"""Where the code of a run is when something happens: the files of its call stacks, written down as it passes.

`python noted_ways.py WORDS...` types `instar WORDS`; `noted_ways:Task` is a task whose ranks note too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import states
from torch import Tensor, nn

import instar
from instar.tasks.user_task import Batch

SOURCE = f"{Path(instar.__file__).parent}/"
FOLDER = "NOTED_WAYS"
"""variable of the environment: the folder of the notes"""
FAILS = "NOTED_WAYS_FAIL"


def files_on_stack() -> list[str]:
    """Return the files of Instar on this thread's call stack, the outermost first, each once."""
    files: dict[str, None] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(SOURCE):
            files[name.removeprefix(SOURCE)] = None
        frame = frame.f_back
    return list(files)[::-1]


def note(what: str) -> None:
    """Write down where this is, the first time only."""
    path = Path(os.environ[FOLDER], f"{what}-{os.environ.get('RANK', 'launcher')}.json")
    if not path.exists():
        path.write_text(json.dumps(files_on_stack()))


def noting(owner: Any, name: str, what: str) -> None:
    """Make a function note where it is called from, and itself, also under the names it was imported by."""
    real: Callable[..., Any] = getattr(owner, name)

    def note_and_call(*args: Any, **options: Any) -> Any:
        note(what)
        return real(*args, **options)

    note_and_call.__code__ = note_and_call.__code__.replace(co_filename=real.__code__.co_filename)
    for module in [owner, *list(sys.modules.values())]:
        if getattr(module, name, None) is real:
            setattr(module, name, note_and_call)


class Task(states.States):
    """Notes where the first step of a rank is, and may fail there on rank 1."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if "run/trainer.py" in files_on_stack():
            note("step")
            if FAILS in os.environ and os.environ["RANK"] == "1":
                from instar.distributed import failure

                noting(failure, "write_failure", "failure")
                raise RuntimeError("the loss of rank 1")
        return super().loss(model, batch)


def main(words: list[str]) -> int:
    from instar.checkpoint import tensor_file
    from instar.cli.main import main as command
    from instar.data import source
    from instar.distributed import failure
    from instar.growth import apply
    from instar.run import optimizer
    from instar.run import worker as worker  # whose names are replaced too
    from instar.run.output import save
    from instar.run.step import stepper
    from instar.schedule import settings, triggers

    noting(settings, "learning_rate", "rate")
    noting(optimizer, "set_learning_rate", "rate set")
    noting(source.TokenWindows, "read", "sample read")
    noting(stepper, "to_device", "sample used")
    noting(save.Saver, "save", "save")
    noting(tensor_file, "write_tensors", "tensors written")
    noting(triggers, "schedule_entries", "entry read")
    noting(apply, "apply_one", "tensor grown")
    noting(failure, "read_failure", "failure read")
    noting(subprocess.Popen, "__init__", "rank started")
    return command(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
