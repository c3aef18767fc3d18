"""What a checkpoint holds besides tensors, and what steps follow from it."""
