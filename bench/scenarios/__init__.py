"""Runs of scenarios: jobs over seeds, rows that are kept, tables."""
