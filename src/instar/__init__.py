"""Instar: training runs that are changed safely while they train. docs/python.md describes its use from Python."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a function of `instar.api` when it is first used: `import instar` stays light."""
    if name.startswith("_") or name not in __dir__():
        raise AttributeError(f"module 'instar' has no attribute {name!r}")
    return getattr(importlib.import_module("instar.api"), name)


def __dir__() -> list[str]:
    # `python -m instar.train` runs the module of that name as `__main__`: nothing imports it over the function
    names: list[str] = importlib.import_module("instar.api").__all__
    return sorted({*names, "__version__"})
