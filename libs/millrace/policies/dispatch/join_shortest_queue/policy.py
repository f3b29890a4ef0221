"""Join the shortest queue, counted in tokens: context that is decoded now and prompts that wait."""

from __future__ import annotations

from random import Random

import msgspec

from millrace.policies.dispatch.pick import pick_lowest
from millrace.policies.dispatch.view import Decision, DispatchView
from millrace.policies.registry import Nothing

#: Load of each sequence that waits for a place in a full batch, above any load in tokens.
_FULL = 1e12


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weight of a running token.

    Attributes:
        running_weight: Weight of a context token of the running batch against a token that waits for its prefill,
            0 to 1. A waiting token must be computed before the newcomer's; a running one only slows each step.
    """

    running_weight: float = 0.25


def decide(
    view: DispatchView, parameters: Parameters, state: Nothing, now_ns: int, rng: Random
) -> tuple[Decision, Nothing]:
    """Waiting and in-flight tokens, and running ones by their weight. A candidate without a summary has only what is
    in flight. One whose batch is full comes after all that have a place, whatever its tokens: a newcomer would wait for
    a sequence to end.
    """
    weight = parameters.running_weight
    loads = [
        c.waiting_prefill_tokens
        + c.in_flight_tokens
        + weight * c.running_tokens
        + (c.batch_full and _FULL * (1 + c.waiting + c.in_flight_sequences))
        for c in view.candidates
    ]
    return pick_lowest(view, loads, rng, unit="tokens queued and running"), state
