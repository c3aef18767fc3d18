"""GRPO on questions with exact answers: TRL's `GRPOTrainer`, seeds that reach the sampler, exact resume."""
