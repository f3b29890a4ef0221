"""The stage policy `one_stage`."""
