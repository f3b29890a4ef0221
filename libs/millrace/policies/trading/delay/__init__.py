"""Moves what shortens the sum of all sequences' times, by simulation of both sides."""
