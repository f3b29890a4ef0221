"""Membership: which instances and services are there, from what they say and from their silence. No I/O."""
