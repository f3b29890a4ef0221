"""The stage policy `fixed`."""
