"""In which keys mappings differ."""

from __future__ import annotations

from instar.config.fields import differing_keys


def test_differing_keys_come_with_all_values() -> None:
    a, b = {"x": 1, "y": 2, "z": 3}, {"y": 2, "z": 4, "w": 5}
    assert differing_keys([a, b]) == {"x": (1, None), "z": (3, 4), "w": (None, 5)}
    assert differing_keys([a, a]) == {}
    assert differing_keys([a, {}]) == {"x": (1, None), "y": (2, None), "z": (3, None)}


def test_what_is_not_known_differs_from_nothing() -> None:
    a, b = {"x": 1, "y": 2}, {"x": 1, "y": 3}
    assert differing_keys([None, a, None, b]) == {"y": (None, 2, None, 3)}
    assert differing_keys([None, a]) == {}
    assert differing_keys([]) == {}
