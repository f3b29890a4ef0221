"""Random: any candidate, each as likely as the others."""

from __future__ import annotations

from random import Random

import msgspec

from millrace.policies.dispatch.pick import nothing, pick_index
from millrace.policies.dispatch.view import Decision, DispatchView


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None."""


class State(msgspec.Struct, frozen=True):
    """None: decisions are independent."""


def decide(
    view: DispatchView, parameters: Parameters, state: State, now_ns: int, rng: Random
) -> tuple[Decision, State]:
    """Draws a candidate. Summaries are not looked at, so missing ones change nothing."""
    if not view.candidates:
        return nothing(view), state
    count = len(view.candidates)
    return pick_index(view, rng.randrange(count), f"drawn at random of {count}"), state
