"""Builds the documentation as a static site, without network: `python docs/sphinx/build.py FOLDER`.

The pages are the README, which becomes the home page, and the Markdown files of docs, examples,
benchmarks and studies, in the places that they have in the repository, so that their links hold here and there.
The reference pages are generated. Every warning is an error, e.g. a broken link.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import reference
from sphinx.cmd.build import build_main

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples", "benchmarks", "studies", "configs", "src", "tests")
"""Folders of pages, and of what pages refer to."""
LINK = re.compile(r"(?<=\]\()[^)#:\s]+(?=[)#])")

NAVIGATION = {
    "First steps": ["docs/first-hour", "docs/tasks", "docs/coming-from"],
    "Train": [
        "docs/training",
        "docs/stopping",
        "docs/checkpoints",
        "docs/seeds",
        "docs/launching",
        "docs/scaling",
        "docs/finetuning",
        "docs/lora",
        "docs/grpo",
    ],
    "Your data": ["docs/data", "docs/splits", "examples/feeds/README"],
    "Your own model": [
        "docs/custom-task",
        "docs/metrics",
        "docs/hooks",
        "docs/graph-networks",
        "examples/causal_sets/README",
    ],
    "Grow": [
        "docs/schedule",
        "docs/control",
        "docs/growth",
        "docs/pilot",
        "docs/growth-anywhere",
        "docs/growth-study",
    ],
    "Results": [
        "docs/your-model",
        "docs/logs",
        "docs/dashboard",
        "docs/harness",
        "docs/python",
        "docs/notebooks",
        "docs/delta",
        "docs/fleet",
    ],
    "When something fails": ["docs/troubleshooting", "docs/reliability", "docs/security"],
    "Reference": [
        "docs/config",
        "docs/environment",
        "docs/reference/commands",
        "docs/reference/python",
        "docs/glossary",
    ],
    "Development": [
        "docs/architecture",
        "docs/adding",
        "docs/extensions",
        "docs/internals",
        "CONTRIBUTING",
        "docs/decisions/README",
        "docs/benchmarks",
        "docs/benchmarks-summary",
        "benchmarks/README",
        "studies/README",
        "docs/journal",
        "CHANGELOG",
    ],
}
"""Pages by caption, in the order of reading. Pages that are missing here come last."""
DECISION = "docs/decisions/0"


def build(out: Path) -> int:
    """Build the site in the folder `out`, which is replaced; return the exit code."""
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        gather(Path(folder))
        options = ["-W", "--keep-going", "-q", "-b", "html", "-c", str(Path(__file__).parent)]
        doctrees = str(Path(folder) / ".doctrees")
        return build_main([*options, "-d", doctrees, folder, str(out)])


def gather(pages: Path) -> None:
    """Copy the pages and what they refer to, and write the generated pages."""
    ignore_caches = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, pages / name, ignore=ignore_caches)
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, pages)
    shutil.copy(ROOT / "README.md", pages / "index.md")
    reference_pages = pages / "docs" / "reference"
    reference_pages.mkdir()
    (reference_pages / "commands.md").write_text(reference.commands(), "utf-8")
    (reference_pages / "python.md").write_text(reference.python(), "utf-8")
    markdown_files = sorted(page for page in pages.rglob("*.md") if "results" not in page.parts)
    for page in markdown_files:
        text = LINK.sub(lambda link: _target(page, link[0]), page.read_text("utf-8"))  # noqa: B023
        page.write_text(text, "utf-8")
    names = [page.relative_to(pages).with_suffix("").as_posix() for page in markdown_files]
    with (pages / "index.md").open("a", encoding="utf-8") as home:
        home.write(_contents(set(names) - {"index"}))
    decisions = pages / "docs" / "decisions" / "README.md"
    with decisions.open("a", encoding="utf-8") as listing:
        listing.write(_tree([name for name in names if DECISION in name]))


def _target(page: Path, link: str) -> str:
    """A folder is its README, and the README of the repository is the home page."""
    path = page.parent / link
    if path.is_dir():
        path /= "README.md"
    if not path.exists() and path.with_name("index.md").exists():
        path = path.with_name("index.md")
    return os.path.relpath(path, page.parent)


def _contents(names: set[str]) -> str:
    linked_names = {name for group in NAVIGATION.values() for name in group}
    other_names = sorted(name for name in names - linked_names if DECISION not in name)
    trees = NAVIGATION | ({"More": other_names} if other_names else {})
    return "".join(
        _tree(group, f":hidden:\n:titlesonly:\n:caption: {name}") for name, group in trees.items()
    )


def _tree(names: list[str], options: str = "") -> str:
    entries = "\n".join(f"/{name}" for name in names)
    return f"\n```{{toctree}}\n{options}\n\n{entries}\n```\n"


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1])))
