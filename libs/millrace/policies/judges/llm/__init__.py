"""LLM: the probability of yes."""
