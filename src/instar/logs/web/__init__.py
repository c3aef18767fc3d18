"""The dashboard and the pages that are written to files."""
