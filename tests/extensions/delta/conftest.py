"""Trainers of a tiny model in this process."""

from tiny_trainers import config, config_in, corpus, losses, prepare_run, trainer

__all__ = ["config", "config_in", "corpus", "losses", "prepare_run", "trainer"]
