"""The stage policy `two_phase`."""
