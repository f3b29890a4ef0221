"""Measuring engines and reading measurements: where step-time models come from."""
