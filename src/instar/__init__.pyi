from instar.api import (
    Run,
    TextLoss,
    compare,
    evaluate,
    launch,
    list_runs,
    load_model,
    load_run,
    load_tokenizer,
    resume,
    sample,
)

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
]

__version__: str
