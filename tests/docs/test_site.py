"""The site: every page is in it, with the reference of commands and keys, and it needs no network."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from forks import Forks

import instar.api
from instar.cli.main import COMMANDS
from instar.config.fields import LANGUAGE, root_of, schema_keys
from instar.extensions import extend_commands

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """Broken links and other warnings fail the build."""
    out = tmp_path_factory.mktemp("site")
    command = [forks.python, ROOT / "docs/sphinx/build.py", out]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, ""), process.stderr
    return out


@pytest.mark.torture
def test_every_page_is_on_the_site_and_in_its_search(site: Path) -> None:
    pages = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "docs").rglob("*.md")]
    index = re.search(r'"docnames":(\[.*?\])', (site / "searchindex.js").read_text("utf-8"))
    assert index is not None
    names = set(json.loads(index[1]))
    assert {"index", "examples/feeds/README", *(page.as_posix() for page in pages)} <= names
    assert all((site / f"{name}.html").exists() for name in names)


def test_the_reference_has_every_command_and_key(site: Path) -> None:
    config = (site / "docs/config.html").read_text("utf-8")
    for key in schema_keys(root_of(LANGUAGE)):
        assert f'<span class="pre">{key}</span>' in config, key
    commands = (site / "docs/reference/commands.html").read_text("utf-8")
    for name in extend_commands(COMMANDS):
        assert f'href="#instar-{name}"' in commands
    assert ">KEY=VALUE<" in commands


def test_the_reference_has_every_name_of_python(site: Path) -> None:
    python = (site / "docs/reference/python.html").read_text("utf-8")
    for name in instar.api.__all__:
        assert f'id="instar.{name}"' in python
    assert 'id="instar.custom.CustomTask.loss"' in python


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="([a-z]+:)?//[^"]*"')
    for page in site.rglob("*.html"):
        assert loads.search(page.read_text("utf-8")) is None, page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?https?:", sheet.read_text("utf-8")), sheet
