"""Millrace's compiled parts. ``enginemodel``: forecasts; see native/README.md."""
