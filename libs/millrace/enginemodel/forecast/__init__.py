"""Forecasts of an instance's future if it took a request, by the engine's own rules. See README.md."""
