"""Answers of the three shipped models to the same prompts, with log-probabilities and the truth."""
