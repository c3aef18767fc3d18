"""Commands on checkpoints and chains of deltas."""
