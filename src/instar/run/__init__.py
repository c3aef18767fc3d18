"""One run, in floors that import only those below them."""
