"""ARES's algorithm 1 to the letter."""
