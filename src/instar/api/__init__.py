"""Instar from Python: train, read runs as tables, and use their models (docs/python.md).

The names here are also attributes of `instar` itself, but for `train`, which is a module there.
Importing this module is cheap; torch is imported by the first call that needs it.
"""

from instar.api.models import TextLoss, evaluate, load_model, load_tokenizer, sample
from instar.api.runs import Run, compare, list_runs, load_run
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
    "resume",
    "sample",
    "train",
]
