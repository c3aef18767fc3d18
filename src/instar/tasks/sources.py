"""The files that define a custom task: its module, and what that imports from its own folder. Nothing is run to
look."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import xxhash

from instar.config.files import read_regular
from instar.config.user_code.definitions import definition_sources
from instar.config.user_code.trust import is_local, module_files

_MOST_BYTES = 1 << 24


def digest_of_sources(task: str) -> str:
    """Return a hash of the files that define a task "module:name"; "" of tasks that are built in or installed.

    It is that of the first call in this process: later edits are not in what has been imported. What a notebook
    defines is as its cells were run last.
    """
    return _digest(definition_sources(task)) if is_local(task) else _imported(task, Path.cwd())


@cache
def _imported(task: str, place: Path) -> str:  # noqa: ARG001
    return _digest(task_files(task) if ":" in task else ())


def _digest(files: Collection[tuple[str, bytes]]) -> str:
    digest = xxhash.xxh3_64()
    for name, content in sorted(files):
        digest.update(f"{name}\n{len(content)}\n".encode() + content)
    return digest.hexdigest() if files else ""


def task_files(task: str) -> tuple[tuple[str, bytes], ...]:
    """Return the files of a task by their names within its folder: its module, the packages around it, and what
    these import from there."""
    modules = [file for file in module_files(task) if file.is_file()]
    if not modules:
        return ()
    top = task.partition(":")[0].split(".")[0]
    first = modules[0].with_suffix("")
    root = next(p for p in first.parents if first.is_relative_to(p / top))
    contents: dict[Path, bytes] = {}
    while modules:
        file = modules.pop()
        if file in contents:
            continue
        try:
            contents[file] = read_regular(file, _MOST_BYTES, follow=True)
        except (OSError, ValueError):
            continue
        if file.suffix == ".py":
            modules += _imported_files(file, contents[file], root)
    return tuple((str(file.relative_to(root)), content) for file, content in contents.items())


def _imported_files(file: Path, content: bytes, root: Path) -> Iterator[Path]:
    """Yield the files below a folder that a module imports."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(root, alias.name.split("."), root)
        elif isinstance(node, ast.ImportFrom):
            above = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else root
            names = node.module.split(".") if node.module else []
            for alias in node.names:  # each may be a module
                yield from _files(above, [*names, alias.name], root)


def _files(folder: Path, names: list[str], root: Path) -> Iterator[Path]:
    """Yield the files that are run when a module of a folder is imported; those that there are."""
    if not folder.is_relative_to(root):
        return
    for name in names:
        for file in (folder / f"{name}.py", folder / name / "__init__.py"):
            if file.is_file():
                yield file
        folder = folder / name
