"""docs/config.md has every key that the classes have: `python docs/sphinx/config_page.py` writes it anew."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from instar.config.fields import known_tasks, root_of, schedule_keys, schema_keys
from instar.extensions.fleet.spec import FleetSpec

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/config.md").read_text("utf-8")
KEYS = re.findall(r"^\| `([\w.\[\]]+)` \| ", PAGE, re.MULTILINE)


def test_the_page_is_the_one_that_the_schema_makes() -> None:
    script = "import sys, config_page; sys.stdout.buffer.write(config_page.page().encode())"
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT / "docs/sphinx", capture_output=True, check=False
    )
    assert process.returncode == 0, process.stderr.decode()
    assert process.stdout.decode() == PAGE


@pytest.mark.parametrize("task", known_tasks())
def test_every_key_of_a_task_is_on_the_page(task: str) -> None:
    assert {*schema_keys(root_of(task))} <= {*KEYS}


def test_keys_within_lists_and_of_fleets_are_on_the_page() -> None:
    of_schedule = {".".join(map(str, path[2:])) for path in schedule_keys()}
    assert {f"schedule[].{key}" for key in of_schedule} <= {*KEYS}
    assert {"early_stopping.rules[].patience", "data.mixture[].weight", "model.heads[].name"} <= {
        *KEYS
    }
    assert {*schema_keys(FleetSpec)} <= {*KEYS}
    assert {"jobs.NAME.retry.max", "search.space.NAME.low"} <= {*KEYS}


@pytest.mark.parametrize(
    ("key", "resume"),
    [
        ("train.batch_size", "changes"),
        ("record.out_dir", "this start"),
        ("seed", "fixed"),
        ("model.n_layer", "fixed, `--allow architecture`"),
        ("data.tokenizer", "fixed, `--allow tokenizer`"),
    ],
)
def test_the_page_says_what_a_resume_does(key: str, resume: str) -> None:
    assert re.search(rf"^\| `{re.escape(key)}` \|.* \| {re.escape(resume)} \|$", PAGE, re.MULTILINE)
