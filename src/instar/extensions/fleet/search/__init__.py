"""Searches: a sampler draws the values of each instance, and a pruner stops those that fall behind."""
