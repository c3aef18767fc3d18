"""Samples: their one global order, sources, splits, and loaders that bring them to the ranks."""
