"""The dashboard: a local page over a folder of runs, read-only, live."""
