"""What tests of the core say of extensions: with a deleted one, they are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from instar.extensions import BUILT_IN, built_in, event_types


def needs(*names: str) -> pytest.MarkDecorator:
    """Mark a test that also looks at extensions of Instar."""
    deleted = [name for name in names if name not in built_in()]
    return pytest.mark.skipif(bool(deleted), reason=f"without the extension {', '.join(deleted)}")


def delta_events(**fields: Any) -> list[Any]:
    """Return an event of an extension; none if it is deleted."""
    kind = event_types().get("delta")
    return [kind(**fields)] if kind else []


def without_deleted(lines: Sequence[str]) -> list[str]:
    """Return command lines without those of deleted extensions."""
    deleted = [
        words
        for name, owned in BUILT_IN.items()
        if name not in built_in()
        for words in (
            *owned.words.get("commands", ()),
            *(f"--format {form}" for form in owned.words.get("plots", ())),
        )
    ]
    return [line for line in lines if not any(f" {words} " in f" {line} " for words in deleted)]
