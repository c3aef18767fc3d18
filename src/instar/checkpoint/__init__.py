"""Checkpoints on disk: published atomically, verified when read; listing, comparison, deltas."""
