"""Reading what runs have written down: curves, summaries, comparisons, plots, reports."""
