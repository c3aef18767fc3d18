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
    plot,
    resume,
    sample,
    train,
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
    "plot",
    "resume",
    "sample",
    "train",
]

__version__: str
