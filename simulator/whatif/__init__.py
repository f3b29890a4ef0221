"""Replays a recorded load on the recorded cluster, and on changed ones."""
