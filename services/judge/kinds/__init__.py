"""Kinds of judges: pure functions from a question to a score, or to what must be asked elsewhere first."""
