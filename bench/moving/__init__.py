"""Runs and tables of the figures about moving running requests by the load to come."""
