"""One page that shows all of a run."""
