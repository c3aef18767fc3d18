"""What `torch.optim` has, without torch: names, arguments, the values that these take, and rates by the step."""
