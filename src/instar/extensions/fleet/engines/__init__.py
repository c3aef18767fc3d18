"""What runs the instances of a fleet: this machine, or the hosts that a scheduler gives."""

from typing import Literal

EngineName = Literal["local", "ray", "slurm"]
