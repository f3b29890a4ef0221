"""The verbs of ``python -m simulator``."""
