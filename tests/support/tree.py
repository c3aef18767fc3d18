"""The tree of folders in docs/architecture.md, made of the docstrings of its packages and of the modules beside them.

    python tests/support/tree.py

writes it anew.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/instar"
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "```text\nsrc/instar/\n", "```\n"
COLUMN, WIDTH = 23, 120


def tree() -> str:
    """Return the tree as text: a line for each folder, and for each module at the top, with what it says of itself."""
    return "".join(_lines(SOURCE, 1))


def _lines(folder: Path, depth: int) -> Iterator[str]:
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if (path / "__init__.py").exists():
            yield _line(f"{path.name}/", path / "__init__.py", depth)
            yield from _lines(path, depth + 1)
        elif path.suffix == ".py" and path.name != "__init__.py" and depth == 1:
            yield _line(path.name, path, depth)


def _line(name: str, module: Path, depth: int) -> str:
    text = ast.get_docstring(ast.parse(module.read_text("utf-8"))) or ""
    sentence = text.partition("\n\n")[0].replace("\n", " ").removesuffix(".")
    head = f"{'  ' * depth}{name}".ljust(COLUMN - 1) + " "
    return f"{textwrap.fill(head + sentence, WIDTH, subsequent_indent=' ' * COLUMN)}\n"


def with_tree(page: str) -> str:
    """Return the text of the page with the tree as it is now."""
    head, _, tail = page.partition(BEGIN)
    return f"{head}{BEGIN}{tree()}{END}{tail.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_tree(PAGE.read_text("utf-8")), "utf-8")
