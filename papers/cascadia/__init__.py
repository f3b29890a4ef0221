"""Reproduction of Cascadia: published loop, allocation by MILP, baselines, traffic that changes."""
