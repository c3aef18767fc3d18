"""Generators of data that configs name, and modules that are typed after `python -m`."""
