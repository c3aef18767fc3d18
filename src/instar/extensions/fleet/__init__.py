"""Many runs side by side with the servers they need: here, on Ray or on SLURM"""
