"""Remaining lengths from the hidden states of a real engine (section 4.2): vLLM classes that its flags name."""
