"""What tests of the core say of extensions: with a deleted one, they are left out."""

from __future__ import annotations

from typing import Any

import pytest

from instar.extensions import built_in, event_types


def needs(*names: str) -> pytest.MarkDecorator:
    """Mark a test that also looks at extensions of Instar."""
    deleted = [name for name in names if name not in built_in()]
    return pytest.mark.skipif(bool(deleted), reason=f"without the extension {', '.join(deleted)}")


def delta_events(**fields: Any) -> list[Any]:
    """Return an event of an extension; none if it is deleted."""
    kind = event_types().get("delta")
    return [kind(**fields)] if kind else []
