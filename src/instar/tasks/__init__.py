"""What is trained: text, token tasks, graphs, tasks of users; losses, metrics, what is logged."""
