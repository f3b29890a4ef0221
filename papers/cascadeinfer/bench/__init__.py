"""Benches of stages by sequence length and of balance."""
