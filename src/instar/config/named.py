"""What a config names of the user's own code."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instar.config.errors import ConfigError


def load_named(name: str, *, key: str) -> Callable[..., Any]:
    """The function or class meant by "module:name"; modules in the current directory count.

    Raises ConfigError, for the config's `key`, where there is no such thing.
    """

    def wrong(message: str, hint: str = "") -> ConfigError:
        return ConfigError.one(message, where=key, hint=hint, key=key)

    module_name, colon, function_name = name.partition(":")
    if not (
        colon and all(part.isidentifier() for part in (*module_name.split("."), function_name))
    ):
        raise wrong(f"{name!r} is not of the form module:function", "as in my_data:augment")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if f"{module_name}.".startswith(f"{error.name}."):
            raise wrong(
                f"there is no module {error.name!r}", f"it was looked for in {here} and PYTHONPATH"
            ) from None
        raise wrong(f"{module_name} cannot be imported: {error}") from error
    except Exception as error:
        raise wrong(f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, function_name):
        there = [each for each in vars(module) if callable(getattr(module, each))]
        close = difflib.get_close_matches(function_name, there, n=1)
        hint = f"did you mean {close[0]!r}?" if close else ""
        raise wrong(f"the module {module_name} has no {function_name!r}", hint)
    found: Callable[..., Any] = getattr(module, function_name)
    if not callable(found):
        raise wrong(f"{name} is nothing to call but of type {type(found).__name__}")
    return found
