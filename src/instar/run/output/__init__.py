"""What a run writes: record, checkpoints in the background, text samples, traces."""
