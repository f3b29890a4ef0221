"""The stage policy `chain`."""
