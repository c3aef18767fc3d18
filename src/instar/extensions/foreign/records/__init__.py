"""Records of other tools: each reader makes the events of a run."""
