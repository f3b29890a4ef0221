"""Exception by which a simulation reports that something is wrong."""

from __future__ import annotations


class SimulationFailed(AssertionError):
    """A handler raised, or a checker did. Carries the seed and the last deliveries."""
