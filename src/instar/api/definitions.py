"""Packs what a notebook or a script defines for the processes that it starts; see `instar.config.user_code.definitions`."""

from __future__ import annotations

import linecache
import sys
from collections import ChainMap
from collections.abc import Iterable
from io import BytesIO
from types import CodeType
from typing import Any, ClassVar

from cloudpickle import CloudPickler

from instar.config.errors import ConfigError
from instar.config.user_code.definitions import MAIN, is_local


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
