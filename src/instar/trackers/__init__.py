"""A run's record in other people's trackers."""
