"""In which keys configs, or other mappings, differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def differing(each: Sequence[Mapping[str, Any] | None]) -> dict[str, tuple[Any, ...]]:
    """The keys that are not alike in all, with the value of each; None where there is no such key.

    A mapping that is None is not known: nothing differs from it.
    """
    known = [one for one in each if one is not None]
    found: dict[str, tuple[Any, ...]] = {}
    for key in dict.fromkeys(key for one in known for key in one):
        if any(one.get(key) != known[0].get(key) for one in known):
            found[key] = tuple(None if one is None else one.get(key) for one in each)
    return found
