"""What is trained: text, token tasks, tasks of users; losses, metrics, what is logged."""
