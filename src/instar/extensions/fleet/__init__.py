"""Many runs side by side with the servers they need, on one machine."""
