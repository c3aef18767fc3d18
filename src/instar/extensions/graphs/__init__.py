"""Graph networks and causal sets: a task with its model, its data and its section of the config"""
