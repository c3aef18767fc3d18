"""What tests of the core say of extensions: with a deleted one, they are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from instar.extensions import BUILT_IN, built_in, event_types


def needs(*names: str) -> pytest.MarkDecorator:
    """Mark a test that also looks at extensions of Instar."""
    missing = [name for name in names if name not in built_in()]
    return pytest.mark.skipif(bool(missing), reason=f"without the extension {', '.join(missing)}")


def delta_events(**fields: Any) -> list[Any]:
    """Return an event of an extension; none if it is deleted."""
    kind = event_types().get("delta")
    return [kind(**fields)] if kind else []


def without_deleted(lines: Sequence[str]) -> list[str]:
    """Return command lines without those of deleted extensions."""
    missing = [
        words
        for name, extension in BUILT_IN.items()
        if name not in built_in()
        for words in (
            *extension.words.get("commands", ()),
            *(f"--format {form}" for form in extension.words.get("plots", ())),
        )
    ]
    return [line for line in lines if not any(f" {words} " in f" {line} " for words in missing)]
