"""Round robin: candidates take turns in order of name."""

from __future__ import annotations

from bisect import bisect_right
from random import Random

import msgspec

from millrace.policies.dispatch.pick import nothing, pick_index
from millrace.policies.dispatch.view import Decision, DispatchView
from millrace.policies.registry import Nothing


class State(msgspec.Struct, frozen=True):
    """Position in the rotation.

    Attributes:
        last: Name that was chosen last; empty before the first. A name, no count: the circle stays fair when
            instances come and go.
    """

    last: str = ""


def decide(view: DispatchView, parameters: Nothing, state: State, now_ns: int, rng: Random) -> tuple[Decision, State]:
    """The first candidate whose name follows the last one's. Summaries are not looked at."""
    if not view.candidates:
        return nothing(view), state
    names = [c.name for c in view.candidates]
    index = bisect_right(names, state.last) % len(names)
    return pick_index(view, index, f"next of {len(names)} in turn"), State(names[index])
