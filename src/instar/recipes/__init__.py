"""Generators of data that the core knows by name only; see `instar.config.graph.GENERATORS`."""
