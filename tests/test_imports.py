"""The structure of the package: no circular imports, unique class names, small folders."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import instar

ROOT = Path(instar.__file__).parent


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in ROOT.rglob("*.py")}


def imports_of(path: Path) -> Iterator[str]:
    """The modules of the package that a file imports: at its top, for types only, or in a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            inside = [name for name in names if name in FILES]
            yield from inside
            if len(inside) < len(names) and node.module in FILES:
                yield node.module


def test_files_import_each_other_in_one_direction() -> None:
    graph = {
        module: {target for target in imports_of(path) if target != module}
        for module, path in FILES.items()
    }
    try:
        order = [*TopologicalSorter(graph).static_order()]
    except CycleError as error:
        raise AssertionError(" → ".join(reversed(error.args[1]))) from None
    assert len(order) == len(FILES)


def test_a_public_class_name_has_one_file() -> None:
    files: dict[str, list[str]] = {}
    for module, path in FILES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in files.items() if len(modules) > 1} == {}


def test_folders_have_at_most_15_files() -> None:
    files = [path for path in FILES.values() if path.name != "__init__.py"]
    folders = Counter(path.parent.relative_to(ROOT).as_posix() for path in files)
    assert {folder: count for folder, count in folders.items() if count > 15} == {}
