"""Graphs of causal sets: sprinklings of Minkowski space, and percolation orders."""
