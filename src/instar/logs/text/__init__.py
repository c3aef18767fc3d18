"""Formats events, summaries and comparisons as text."""
