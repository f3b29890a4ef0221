"""Examples of Hypothesis have no deadline: here they are computed with least claim to a core (setup/run_tests.py)."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
