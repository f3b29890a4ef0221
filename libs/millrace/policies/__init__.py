"""Scheduling policies: pure functions, one folder each."""
