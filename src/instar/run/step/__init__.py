"""One step: accumulate, check, clip, update; evaluation; hooks of the user."""
