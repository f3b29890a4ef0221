"""Fewest requests per minute: whoever was given least in the last 60 seconds."""
