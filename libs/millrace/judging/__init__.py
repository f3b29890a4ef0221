"""Scores of answers, 0 to 100: how likely an answer is right. Pure; no I/O."""
