"""Halves of a run: one is fitted, the other shows how good the fit is."""

from __future__ import annotations

from bench.live.recording import Recording

#: Fitted and compared slices of a run take turns: a machine that gets slower does not tell the halves apart.
SLICE_NS = 2_000_000_000


def fitted_on(recording: Recording, at_ns: int) -> bool:
    """Whether this time belongs to the half of the run that is fitted: every other slice of it."""
    return (at_ns - recording.began_ns) // SLICE_NS % 2 == 0
