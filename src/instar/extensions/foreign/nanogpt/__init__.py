"""nanoGPT's checkpoints and data as runs and data sets."""
