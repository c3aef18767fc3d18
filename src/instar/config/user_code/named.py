"""Imports user code by its name `module:name`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instar.config.errors import ConfigError, nearest
from instar.config.user_code.definitions import bring_definitions
from instar.config.user_code.failures import what_happened
from instar.config.user_code.trust import MAIN, is_local


def _file_hint(module: str, name: str) -> str:
    """Return a hint for a module that does not exist: a file here of nearly its name."""
    files = {path.stem: path for path in Path().glob("*.py")}
    close = nearest(module.removesuffix(".py"), files)
    return f"did you mean '{close}:{name}'?" if close else ""


def load_named(name: str, *, key: str) -> Callable[..., Any]:
    """Import the function or class "module:name"; the current directory is searched too.

    Raises ConfigError, for the config's `key`, if it does not exist.
    """

    def wrong(message: str, hint: str = "") -> ConfigError:
        return ConfigError.at(key, message, hint)

    module_name, colon, function_name = name.partition(":")
    if is_local(name) and not hasattr(sys.modules[MAIN], function_name):
        bring_definitions()
        if not hasattr(sys.modules[MAIN], function_name):
            raise wrong(
                f"{function_name} was defined in a notebook or a script, and is not defined here",
                f"go on there, after its definition; or move it to a module, and set {key}=module:{function_name}",
            )
    if not (
        colon and all(part.isidentifier() for part in (*module_name.split("."), function_name))
    ):
        raise wrong(f"{name!r} is not of the form module:function", "as in my_data:augment")
    cwd = str(Path.cwd())
    if cwd not in sys.path and "" not in sys.path:
        sys.path.insert(0, cwd)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if f"{module_name}.".startswith(f"{error.name}."):
            where = f"it was looked for in {cwd} and PYTHONPATH"
            hint = _file_hint(module_name, function_name) or where
            raise wrong(f"there is no module {error.name!r}", hint) from None
        raise wrong(f"{module_name} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise wrong(f"{module_name} cannot be imported: {what_happened(error)}") from error
    if not hasattr(module, function_name):
        names = [name for name in vars(module) if callable(getattr(module, name))]
        close = nearest(function_name, names)
        hint = f"did you mean {close!r}?" if close else ""
        raise wrong(f"the module {module_name} has no {function_name!r}", hint)
    factory: Callable[..., Any] = getattr(module, function_name)
    if not callable(factory):
        raise wrong(f"{name} is not callable: its type is {type(factory).__name__}")
    return factory
