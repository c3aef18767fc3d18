"""Charts as data, and their output as files and in a terminal."""
