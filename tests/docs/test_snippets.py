"""Everything that README and docs tell a person to type is typed here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "benchmarks/README.md",
        ROOT / "examples/feeds/README.md",
        ROOT / "examples/causal_sets/README.md",
    ]
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")


def snippets(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text("utf-8")) if kind == language]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", [p for p in PAGES if snippets(p, "bash")], ids=lambda page: page.name
)
def test_the_commands_of_a_page_work_one_after_the_other(page: Path, tmp_path: Path) -> None:
    opener = tmp_path / "desktop" / "xdg-open"  # a machine for tests has no desktop
    opener.parent.mkdir()
    opener.write_text('#!/bin/sh\ntest -s "$1"\n')
    opener.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{opener.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(tmp_path / "huggingface"),
    }
    for snippet in snippets(page, "bash"):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", snippet],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{snippet}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fence_says_what_it_is(page: Path) -> None:
    kinds = {kind for kind, _ in FENCE.findall(page.read_text("utf-8"))}
    assert kinds <= {"bash", "text", "yaml", "json", "python"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    assert named
    assert named <= targets


def test_the_tree_in_the_architecture_page_is_the_one_on_disk() -> None:
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    rooms = {
        path.name for path in (ROOT / "src/instar").iterdir() if (path / "__init__.py").exists()
    }
    for room in rooms:
        assert f"  {room}/" in page, room
        for file in (ROOT / "src/instar" / room).glob("*.py"):
            if file.name != "__init__.py":
                assert file.name in page, f"{room}/{file.name}"
