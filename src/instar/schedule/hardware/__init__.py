"""What a run takes on devices that are not here: a table of them, time, memory, cost."""
