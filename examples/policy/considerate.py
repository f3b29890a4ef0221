"""Considerate: of the instances that would end a request nearly as soon as the best, the one whose others wait least.

Try it in simulation, then live, from this file (docs/SIMULATION.md walks through it):

    ./task sim --scenario examples/scenarios/mixed.toml --set dispatch.policy=examples/policy/considerate.py
    ./task up --engine modelled --policy examples/policy/considerate.py
"""

from random import Random
from typing import Annotated

import msgspec
from millrace.policies.dispatch import Decision, DispatchView, Prediction, QueryParameters
from millrace.policies.dispatch.asking import answered, draw
from millrace.policies.dispatch.pick import nothing, pick_lowest


class Parameters(QueryParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Beside those of every policy that asks: deadline, fallback and so on.

    Attributes:
        candidates: How many random instances are asked; 0 for all.
        slack: An instance that ends the request at most this share later than the best is as good as it.
    """

    candidates: Annotated[int, msgspec.Meta(ge=0)] = 8
    slack: Annotated[float, msgspec.Meta(ge=0)] = 0.1


class State(msgspec.Struct, frozen=True):
    """Nothing is remembered between decisions."""


def ask(view: DispatchView, parameters: Parameters, rng: Random) -> tuple[str, ...]:
    """Choose the instances whose predictors ingress asks before ``decide`` is called."""
    return draw(view, parameters.candidates, rng)


def decide(
    view: DispatchView, parameters: Parameters, state: State, now_ns: int, rng: Random
) -> tuple[Decision, State]:
    """A pure function: no clock, no I/O, randomness only from ``rng``."""
    known = answered(view)
    if not known.candidates:
        return nothing(known), state
    predicted = [known.predictions[candidate.name] for candidate in known.candidates]
    latest_ns = (1 + parameters.slack) * min(map(_end_ns, predicted))
    good = [i for i, prediction in enumerate(predicted) if _end_ns(prediction) <= latest_ns]
    shortlist = msgspec.structs.replace(known, candidates=tuple(known.candidates[i] for i in good))
    delays_ms = [predicted[i].others_delay_ns / 1e6 for i in good]
    return pick_lowest(shortlist, delays_ms, rng, unit="ms of delay for others"), state


def _end_ns(prediction: Prediction) -> int:
    """Estimate the request's end-to-end time.

    Requests placed there after the question have their prefill first; the prediction does not know of them.
    """
    return prediction.e2e_ns + prediction.placed_since * prediction.ttft_ns
