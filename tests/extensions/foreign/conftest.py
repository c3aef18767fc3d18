"""A tiny corpus and config in a folder, `instar` typed there, and records that the tools have written."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from tool_records import Written, write_record
from typed_places import fill, instar, place, run_cli

__all__ = ["fill", "instar", "place", "record_of", "run_cli"]


@pytest.fixture(scope="session")
def record_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """Returns what a tool has written, which it does once."""

    @cache
    def record(tool: str) -> Written:
        return write_record(tool, tmp_path_factory.mktemp(tool))

    return record
