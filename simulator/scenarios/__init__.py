"""Scenarios from files: a cluster of the real actors in virtual time, a workload, and what came out."""
