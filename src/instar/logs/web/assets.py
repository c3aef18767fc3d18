"""Where the files of the page are."""

PLACES = ("page", "styles", "charts")
"""folders beside this file; no two of their files have the same name"""
