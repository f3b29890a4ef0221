"""The stage policy `exact`."""
