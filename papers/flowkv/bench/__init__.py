"""Benches of the reproduction."""
