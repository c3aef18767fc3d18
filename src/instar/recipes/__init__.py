"""Modules that are typed after `python -m`."""
