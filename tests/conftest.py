"""What all tests have in common."""

from hypothesis import settings

# how long an example takes is the machine's business
settings.register_profile("instar", deadline=None)
settings.load_profile("instar")
