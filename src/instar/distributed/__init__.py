"""Ranks: launch, rendezvous, agreement, exact sums, shards; a watchdog that names who hangs."""
