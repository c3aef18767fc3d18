"""A search for a schedule of growth."""
