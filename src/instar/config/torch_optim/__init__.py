"""What `torch.optim` has, as tables that need no torch: names, arguments, and the values that these take"""
