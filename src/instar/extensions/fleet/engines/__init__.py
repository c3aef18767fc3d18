"""What runs the instances of a fleet: this machine, or the hosts that a scheduler gives."""
