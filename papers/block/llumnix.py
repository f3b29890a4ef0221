"""Llumnix's dispatcher: memory left beside what the queue's prefills will need, per sequence of the batch."""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec
from millrace.policies.dispatch.pick import pick_lowest
from millrace.policies.dispatch.view import Decision, DispatchView


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory measure by which candidates are compared.

    Attributes:
        memory: ``used``: least used and queued memory per running sequence, as Block's text prints it. ``free``: most
            memory that is left after that per running sequence, as Block's code and Llumnix have it. The two differ:
            the first is about the mean length of a sequence, and says nothing of how full an instance is.
    """

    memory: Literal["used", "free"] = "free"


class State(msgspec.Struct, frozen=True):
    """None: the summaries hold it."""


def decide(
    view: DispatchView, parameters: Parameters, state: State, now_ns: int, rng: Random
) -> tuple[Decision, State]:
    """Free (or used) memory, the queue counted as used, over batch size. What is in flight stands in the queue: it
    adds to memory, not to the batch. A candidate without a summary has only that.
    """
    free = parameters.memory == "free"
    loads = [
        (c.used_tokens + c.waiting_prefill_tokens + c.in_flight_tokens - free * c.total_tokens) / (c.running or 1)
        for c in view.candidates
    ]
    if free:
        return pick_lowest(view, loads, rng, unit="tokens of missing memory per running sequence"), state
    return pick_lowest(view, loads, rng, unit="tokens of used and queued memory per running sequence"), state
