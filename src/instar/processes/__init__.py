"""Child processes that end with their launcher, and pools that answer calls."""
