"""What is asked of runs: status, summary, stages, config, comparison."""
