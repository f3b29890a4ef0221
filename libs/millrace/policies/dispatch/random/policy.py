"""Random: any candidate, each as likely as the others."""

from __future__ import annotations

from random import Random

from millrace.policies.dispatch.pick import nothing, pick_index
from millrace.policies.dispatch.view import Decision, DispatchView
from millrace.policies.registry import Nothing


def decide(
    view: DispatchView, parameters: Nothing, state: Nothing, now_ns: int, rng: Random
) -> tuple[Decision, Nothing]:
    """Draws a candidate. Summaries are not looked at, so missing ones change nothing."""
    if not view.candidates:
        return nothing(view), state
    count = len(view.candidates)
    return pick_index(view, rng.randrange(count), f"drawn at random of {count}"), state
