"""Nearest: on the same machine where anybody has room there; the most idle one of those."""
