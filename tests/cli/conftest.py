"""A tiny corpus and config in a folder, and `instar` typed there."""

from typed_places import fill, instar, place, run_cli

__all__ = ["fill", "instar", "place", "run_cli"]
