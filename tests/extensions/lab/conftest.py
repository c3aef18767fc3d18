"""A tiny corpus and config in a folder, and `instar` typed there."""

from tiny_trainers import config, config_in, corpus, losses, prepare_run, trainer
from typed_places import fill, instar, place, run_cli

__all__ = [
    "config",
    "config_in",
    "corpus",
    "fill",
    "instar",
    "losses",
    "place",
    "prepare_run",
    "run_cli",
    "trainer",
]
