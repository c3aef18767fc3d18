"""Curves of runs as pictures: what to draw (`chart`), and how, on paper or on a terminal."""
