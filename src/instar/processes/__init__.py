"""Processes: children that end with their launcher, pools that answer calls, cores, and what Ctrl-C does."""
