"""Optimizers: groups, rates and state by name; Muon, in batches and on shards."""
