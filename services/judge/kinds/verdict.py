"""Verdict that each kind of judge returns."""

from __future__ import annotations

import msgspec


class Verdict(msgspec.Struct, frozen=True):
    """A score, or why there is none.

    Attributes:
        score: 0 to 100; None where the judge cannot tell.
        reason: One sentence.
    """

    score: float | None
    reason: str = ""
