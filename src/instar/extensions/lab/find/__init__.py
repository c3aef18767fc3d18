"""Short trainings that leave no run behind: a learning rate, a micro-batch, a step's time."""
