"""Packs what a notebook or a script defines for the processes that it starts; see `instar.config.user_code.definitions`."""

from __future__ import annotations

import linecache
import os
import sys
import tempfile
from collections import ChainMap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar

from cloudpickle import CloudPickler

from instar.config.errors import ConfigError
from instar.config.load import Loaded
from instar.config.user_code.definitions import (
    DEFINITIONS_VARIABLE,
    module_folders,
)
from instar.config.user_code.trust import MAIN, code_names, is_local
from instar.distributed.launch import environment


def _with_file(code: CodeType) -> tuple[Any, tuple[Any, ...]]:
    """Return what pickles compiled code: as cloudpickle does, which leaves out the name of the file; tracebacks need it."""
    make, arguments = CloudPickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if a == "<dynamic-code>" else a for a in arguments)


class _Pickler(CloudPickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _with_file}, CloudPickler.dispatch_table)


def packed_definitions(names: Iterable[str]) -> bytes:
    """Pickle what `__main__` defines by these names, with what it uses from there; empty: none is of `__main__`.

    Raises:
        ConfigError: it holds something that another process cannot be given, such as an open file.
    """
    main = sys.modules[MAIN]
    codes = {name: getattr(main, name.partition(":")[2]) for name in names if is_local(name)}
    if not codes:
        return b""
    # a cell has no file, and its entry no time of change
    cells = {file: entry for file, entry in linecache.cache.items() if entry[1:2] == (None,)}
    content = BytesIO()
    try:
        _Pickler(content).dump((codes, cells))
    except Exception as error:
        raise ConfigError.of(
            f"{', '.join(codes)} cannot be passed to other processes: {type(error).__name__}: {error}",
            where="instar.launch",
            hint="define it in a module, or train in this process with instar.train",
        ) from error
    return content.getvalue()


@contextmanager
def code_for_children(loaded_config: Loaded, *, is_parent: bool = True) -> Iterator[None]:
    """Let processes that are started inside find what this one does: the modules of a config's code, and the classes and
    functions of a notebook or script.

    Args:
        is_parent: whether processes are started.
    """
    names = set(code_names(loaded_config.data))
    if not (names and is_parent):
        yield
        return
    folders = [os.environ.get("PYTHONPATH", ""), *module_folders()]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, dict.fromkeys(folders)))}
    with tempfile.TemporaryDirectory(prefix="instar-code-") as folder:
        if content := packed_definitions(names):
            file = Path(folder) / "definitions.pickle"
            file.write_bytes(content)
            variables[DEFINITIONS_VARIABLE] = str(file)
        with environment(variables):
            yield
