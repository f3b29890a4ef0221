"""INFaaS++: least memory in use per sequence of the batch."""

from __future__ import annotations

from random import Random

import msgspec

from millrace.policies.dispatch.pick import pick_lowest
from millrace.policies.dispatch.view import Decision, DispatchView


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None."""


class State(msgspec.Struct, frozen=True):
    """None: the summaries hold it."""


def decide(
    view: DispatchView, parameters: Parameters, state: State, now_ns: int, rng: Random
) -> tuple[Decision, State]:
    """Used memory over batch size; what is in flight counts in both. A candidate without a summary has only that."""
    loads = [(c.used_tokens + c.in_flight_tokens) / ((c.running + c.in_flight_sequences) or 1) for c in view.candidates]
    return pick_lowest(view, loads, rng, unit="tokens of used memory per running sequence"), state
