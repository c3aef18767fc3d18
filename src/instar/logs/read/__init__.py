"""Reads records: lines to columns and events, tolerant, cached."""
