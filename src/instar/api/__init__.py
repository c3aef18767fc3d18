"""Instar from Python: train, read runs as tables, and use their models (docs/python.md).

The names here are also attributes of `instar` itself. Each module is imported when a name of it is first used, and
torch by the first call that needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instar.api.models import TextLoss, evaluate, load_model, load_tokenizer, sample
    from instar.api.runs import Run, compare, list_runs, load_run, plot
    from instar.api.training import launch, resume, train

__all__ = [
    "Run",
    "TextLoss",
    "compare",
    "evaluate",
    "launch",
    "list_runs",
    "load_model",
    "load_run",
    "load_tokenizer",
    "plot",
    "resume",
    "sample",
    "train",
]

_MODULES = {
    "models": ("TextLoss", "evaluate", "load_model", "load_tokenizer", "sample"),
    "runs": ("Run", "compare", "list_runs", "load_run", "plot"),
    "training": ("launch", "resume", "train"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
