"""What a run comes from: its config, starting weights, the checkpoint it resumes. No torch."""
