"""Presets: files of values, and the two that are computed from the rest of a config (`growing`)."""
