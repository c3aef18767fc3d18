"""The dashboard and the pages that are written to files."""

PLACES = ("page", "styles", "charts")
"""folders beside this file; no two of their files have the same name"""
