"""Code that a notebook or a script defines, for the processes that it starts.

A config names code as `module:name`. What is defined in a notebook, or in the script that runs, has the module
`__main__`, which is another one in every process. `instar.api.definitions` packs the classes and functions themselves,
with the lines of their source for tracebacks; a process that finds none in its own `__main__` takes them
from the file that `DEFINITIONS_VARIABLE` names, if this user has written it.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from instar.config.errors import ConfigError
from instar.config.files import open_regular
from instar.config.user_code.trust import MAIN

DEFINITIONS_VARIABLE = "INSTAR_DEFINITIONS"
"""path of the file with the definitions that a parent process has packed"""


def module_folders() -> list[str]:
    """Return the folders in which this process looks for modules that are not installed, such as a script's own."""
    ours = (Path(folder) for folder in sys.path if folder and Path(folder).is_dir())
    prefixes = (sys.prefix, sys.base_prefix)
    return [str(folder) for folder in ours if not any(map(folder.is_relative_to, prefixes))]


def code_name(code: Callable[..., Any]) -> str:
    """Return "module:name" of a class or function, as a config has it.

    Raises:
        ConfigError: no name leads to it: it is defined inside a function, or was defined anew since.
    """
    module = getattr(code, "__module__", None)
    name = getattr(code, "__qualname__", type(code).__name__)
    if getattr(sys.modules.get(str(module)), name, None) is not code:
        raise ConfigError.of(
            f"{name} cannot be found by its name in {module}",
            where="instar",
            hint="define it at the top level of a cell or module, and pass what has that name now",
        )
    return f"{module}:{name}"


def bring_definitions() -> None:
    """Define in this process's `__main__` what its parent has packed, if anything.

    Raises:
        ConfigError: the file cannot be read, or belongs to another user.
    """
    path = os.environ.get(DEFINITIONS_VARIABLE)
    if path is None:
        return
    try:
        with open_regular(path) as file:  # its owner is asked of what is read, not of the path
            is_own = os.fstat(file.fileno()).st_uid == os.geteuid()
            content = file.read() if is_own else b""
    except OSError as error:
        raise ConfigError.of(
            f"cannot read {path}: {error.strerror}", DEFINITIONS_VARIABLE
        ) from None
    if not is_own:
        raise ConfigError.of(f"{path} belongs to another user", DEFINITIONS_VARIABLE)
    codes, cells = pickle.loads(content)  # noqa: S301 - this user's, in a folder that is closed to others
    linecache.cache.update(cells)
    for name, code in codes.items():
        setattr(sys.modules[MAIN], name.partition(":")[2], code)


def definition_sources(name: str) -> tuple[tuple[str, bytes], ...]:
    """Return the source of a class or function of `__main__`, and of what it uses from there, by name, as far as it is
    known."""
    main = vars(sys.modules[MAIN])
    sources: dict[str, bytes] = {}
    waiting = [name.partition(":")[2]]
    while waiting:
        current = waiting.pop()
        code = main.get(current)
        if current in sources or getattr(code, "__module__", None) != MAIN:
            continue
        sources[current] = _source(current, code).encode()
        waiting += (used for function in _functions(code) for used in _names_in(function.__code__))
        waiting += [base.__name__ for base in getattr(code, "__bases__", ())]
    return tuple(sources.items())


def _functions(code: object) -> Iterator[FunctionType]:
    """Yield the functions that a class or function is made of."""
    values = vars(code).values() if isinstance(code, type) else (code,)
    for value in values:
        if isinstance(value, property):
            value = value.fget
        function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
        if isinstance(function, FunctionType):
            yield function


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _source(name: str, code: object) -> str:
    """Return the text of a definition; empty where no file or cell is known to hold it."""
    # inspect.getsource knows no class of a notebook, whose module has no file
    for file in dict.fromkeys(function.__code__.co_filename for function in _functions(code)):
        text = "".join(linecache.getlines(file))
        try:
            nodes = ast.walk(ast.parse(text))
        except SyntaxError:  # a cell with a command of IPython's
            return text
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return ast.get_source_segment(text, node) or text
    return ""
