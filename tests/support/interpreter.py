"""What `python` does with its words, in a process that has been forked from one that has imported everything."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn


def put_in(place: str, environment: Mapping[str, str]) -> None:
    """Set the folder and the environment, and forget what was derived from those before."""
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None


def interpret(words: Sequence[str]) -> int:
    """`python [-u]`, and behind it `-c PROGRAM …`, `-m MODULE …`, `FILE …` or `-`."""
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.modules["__main__"] = main = ModuleType("__main__")
    is_unbuffered = words[0] == "-u"
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty(), write_through=is_unbuffered)
    match words[is_unbuffered:]:
        case ["-c", program, *arguments]:
            sys.argv[:] = ["-c", *arguments]
            sys.path[0] = ""
            exec(compile(program, "<string>", "exec", dont_inherit=True), vars(main))
        case ["-", *arguments]:
            sys.argv[:] = ["-", *arguments]
            sys.path[0] = ""
            exec(compile(sys.stdin.read(), "<stdin>", "exec", dont_inherit=True), vars(main))
        case ["-m", module, *arguments]:
            sys.argv[:] = [module, *arguments]
            sys.path[0] = str(Path.cwd())
            sys.modules.pop(module, None)
            runpy._run_module_as_main(module)
        case [file, *arguments]:
            sys.argv[:] = [file, *arguments]
            sys.path[0] = str(Path(file).resolve().parent)
            main.__file__ = str(Path(file).absolute())
            source = Path(file).read_bytes()
            exec(compile(source, main.__file__, "exec", dont_inherit=True), vars(main))
    return 0


def run_and_leave(work: Callable[[], int]) -> NoReturn:
    """Do it, and end as an interpreter would."""
    code = 1
    try:
        code = work()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """End as an interpreter does: after other threads and what is to be done at exit."""
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    os._exit(code)
