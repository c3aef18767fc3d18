"""Before the first step: resolve, check, open, build or restore; nothing is created too early."""
