"""The commands of `instar logs`."""
