"""The file of a pilot: what is written is read again, and nothing else is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pilots import a_pilot

from instar.config.errors import ConfigError
from instar.extensions.lab.pilot_file import read_pilot, write_json


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.pilot.json"
    write_json(path, a_pilot(lambda _: 0.2))
    return path


def test_what_is_written_is_read_again(file: Path) -> None:
    assert read_pilot(file) == a_pilot(lambda _: 0.2)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", 2, r"\$.version"),
        ("tokens_per_step", 0, "> 0"),
        ("run_steps", 10**30, r"\$.run_steps"),
        ("run_dir", "/etc", "unknown field"),
        ("cases", [], "length >= 1"),
        ("cases", [{"arm": "../..", "seed": 1, "steps": 1}], r"arm"),
        ("runs", [{"case": {"arm": "final", "seed": 1, "steps": 1}, "loss": None}], "loss"),
        ("runs", [[]] * 5000, r"\$.runs"),
        ("small", {"parameters": 1, "flops_per_token": "1", "seconds_per_step": 1}, "flops_per"),
    ],
)
def test_what_is_wrong_in_it_is_named(file: Path, key: str, value: Any, message: str) -> None:
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {key: value}))
    with pytest.raises(ConfigError, match=message) as error:
        read_pilot(file)
    assert str(file) in str(error.value)


def test_what_is_no_pilot_is_refused(file: Path) -> None:
    for text in (b"", b"{", b"\xff\xfe", b"[1, 2]", b'{"version": 1}', b"[" * 100_000):
        file.write_bytes(text)
        with pytest.raises(ConfigError, match="is not a pilot file"):
            read_pilot(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pilot(file.with_name("none.json"))
