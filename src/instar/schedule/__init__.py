"""Scheduled operations: triggers, settings as a fold of history, branches, the forecast."""
