"""Everything that README and docs tell a person to type is typed here."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import tree
from forks import Forks, forks_for_grpo

from instar.config.load import load_config

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "benchmarks/README.md",
        ROOT / "studies/README.md",
        ROOT / "examples/custom/README.md",
        ROOT / "examples/feeds/README.md",
        ROOT / "examples/causal_sets/README.md",
    ]
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HERE_DOCUMENT = re.compile(r"(?<=<<'END'\n).*?^END\n", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")


LONG = (
    "checkpoints.md",
    "custom-task.md",
    "finetuning.md",
    "first-hour.md",
    "graph-networks.md",
    "growth.md",
    "launching.md",
    "logs.md",
    "pilot.md",
    "schedule.md",
    "tasks.md",
)
"""pages whose commands train for long: `make torture` types them"""
SHORTER = {"first-hour.md": (r"\b(\d+)00(?=it\b|\})", r"\1")}
"""what is replaced in commands of a page, which a person types as they stand there: budgets and steps"""
TYPED = ("bash", "console")
"""fences of commands: alone, or after `$ ` and followed by what they print"""
VARYING = (
    (r"^[a-z][a-z2-9]{4}(?=  )", "ID"),
    (r"\b(run |[\w.]+-)[a-z][a-z2-9]{4}\b", r"\1ID"),
    (r"\d[\d,.]*(?:e[+-]?\d+)?", "0"),
    (r"\b0(?:ms|s|m0?|m0s|h0?|d0?)(?!\w)", "TIME"),
    (r"\b0(?:[kMBT]|%|)(?= |$|→|/)", "0"),
    (r"-{2,}|─+", "-"),
    (r" +", " "),
)
"""what differs from one run or machine to another: ids, numbers, durations, the widths of columns"""


def snippets(page: Path, *languages: str) -> list[tuple[str, str]]:
    fences = FENCE.findall(page.read_text("utf-8"))
    return [(kind, text) for kind, text in fences if kind in languages]


def commands(kind: str, text: str) -> list[tuple[str, list[str] | None]]:
    """The commands of a snippet, each with the lines that it prints, where these are given."""
    if kind == "bash":
        return [(text, None)]
    parts = re.split(r"^\$ ((?:.*\\\n)*.*)\n", text, flags=re.MULTILINE)
    return [
        (command, output.rstrip("\n").split("\n") if output else [])
        for command, output in zip(parts[1::2], parts[2::2], strict=True)
    ]


def without_variables(line: str) -> str:
    """The line without what varies."""
    for pattern, instead in VARYING:
        line = re.sub(pattern, instead, line)
    return line.strip()


def is_printed(page_lines: list[str], output_lines: list[str]) -> bool:
    """Whether the lines of a page are those printed; `...` stands for any lines."""
    pattern = "".join(
        "(?:.*\n)*?" if line == "..." else re.escape(f"{without_variables(line)}\n")
        for line in page_lines
    )
    return (
        re.fullmatch(pattern, "".join(f"{without_variables(line)}\n" for line in output_lines))
        is not None
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.torture] * (page.name in LONG))
        for page in PAGES
        if snippets(page, *TYPED)
    ],
)
def test_the_commands_of_a_page_work_one_after_the_other(
    page: Path, tmp_path: Path, forks: Forks
) -> None:
    """With `instar`, `python` and `torchrun` that have imported everything."""
    first = tmp_path / "first-in-path"
    first.mkdir()
    opener = first / "xdg-open"  # a machine for tests has no desktop
    opener.write_text('#!/bin/sh\ntest -s "$1"\n')
    opener.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{first}:{forks.bin}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    page_commands = [
        entry for kind, text in snippets(page, *TYPED) for entry in commands(kind, text)
    ]
    if any("recipes.grpo" in snippet for snippet, _ in page_commands):
        forks_for_grpo()
    for original, page_lines in page_commands:
        snippet = re.sub(*SHORTER[page.name], original) if page.name in SHORTER else original
        process = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", snippet],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert process.returncode == 0, f"{snippet}\n{process.stdout}"
        if page_lines is not None:
            output_lines = process.stdout.splitlines()
            assert is_printed(page_lines, output_lines), (
                f"{snippet}\n{process.stdout}\nis not\n" + "\n".join(page_lines)
            )


def test_output_on_a_page_may_differ_in_numbers_only() -> None:
    output_lines = ["run demo-r7f3a", "   2.8s  step 1,000  4.1k tok/s", "kept", "val 3.1"]
    assert is_printed(["run demo-abcde", "1m05  step 6  972 tok/s", "...", "val 4.0"], output_lines)
    assert is_printed(["..."], output_lines)
    assert not is_printed(["run demo-r7f3a"], output_lines)
    assert not is_printed(["...", "loss 3.1"], output_lines)
    assert not is_printed(["...", "kept"], output_lines)


def test_the_readme_lists_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    rows = re.findall(r"^\| (`.*`) \| ", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(extras)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fence_says_what_it_is(page: Path) -> None:
    kinds = {kind for kind, _ in FENCE.findall(page.read_text("utf-8"))}
    assert kinds <= {"bash", "console", "text", "yaml", "json", "python", "diff"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_a_common_task_takes_at_most_two_commands_or_an_edit(tmp_path: Path) -> None:
    page = ROOT / "docs/tasks.md"
    (_, *tasks), edits = snippets(page, "bash"), snippets(page, "yaml")
    assert len(tasks) + len(edits) == page.read_text("utf-8").count("\n**") >= 30
    for _, task in tasks:
        command_lines = HERE_DOCUMENT.sub("", task.replace("\\\n", ""))
        assert len(command_lines.splitlines()) <= 2, task
    for _, task in edits:
        (tmp_path / "edited.yaml").write_text(task)
        load_config(str(tmp_path / "edited.yaml"))


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    page_targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    assert page_targets
    assert page_targets <= targets


def test_the_tree_in_the_architecture_page_is_the_one_on_disk() -> None:
    """`python tests/support/tree.py` writes it anew."""
    page = tree.PAGE.read_text("utf-8")
    assert tree.with_tree(page) == page
    assert len(page.splitlines()) <= 150


def test_what_the_architecture_page_says_where_to_add_is_there() -> None:
    page = tree.PAGE.read_text("utf-8").partition("## Where to add")[2]
    for name in re.findall(r"`((?:\w+/)+[\w.]*)`", page):
        assert (tree.SOURCE / name).exists(), name


def test_what_the_paths_through_the_code_name_is_in_those_files() -> None:
    page = (ROOT / "docs/internals.md").read_text("utf-8")
    lines = re.findall(r"^\d+\. \[(\S+)\]\(\S+\): (.*)$", page, re.MULTILINE)
    rows = re.findall(r"^\| [^|]+ \| (`\S+\.py`[^|]*) \| ([^|]+) \|$", page, re.MULTILINE)
    file_names = [([file], re.findall(r"`([A-Z]\w+)", text)) for file, text in lines]
    for file, text in lines:
        linked_files = [file, *re.findall(r"\]\(\.\./src/instar/(\S+\.py)\)", text)]
        sources = [(ROOT / "src/instar" / name).read_text("utf-8") for name in linked_files]
        for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", text):
            last = name.rpartition(".")[2]
            assert any(re.search(rf"\b{last}\b", source) for source in sources), (file, name)
    file_names += [
        (re.findall(r"`(\S+)`", files), re.findall(r"`(\w+)`", names)) for files, names in rows
    ]
    assert len(lines) > 40
    assert len(rows) == 10
    for files, names in file_names:
        text = "\n".join((ROOT / "src/instar" / file).read_text("utf-8") for file in files)
        for name in names:
            assert re.search(rf"\b(class|def) {name}\b", text), (files, name)


def test_every_page_is_reached_from_the_readme() -> None:
    targets = {
        (ROOT / target).resolve()
        for target in LINK.findall((ROOT / "README.md").read_text("utf-8"))
        if "://" not in target
    }
    pages = {page.resolve() for page in (ROOT / "docs").glob("*.md")}
    assert pages <= targets, pages - targets
