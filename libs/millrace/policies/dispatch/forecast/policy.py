"""Forecast: each candidate's predictor simulates the instance with this request added; the best future is chosen."""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from random import Random
from typing import Annotated, Literal

import msgspec

from millrace.policies.dispatch.asking import QueryParameters, answered, draw
from millrace.policies.dispatch.pick import nothing, pick_index, pick_lowest
from millrace.policies.dispatch.view import Decision, DispatchView

_MS = 1e6
_PREEMPTIONS, _TTFT_NS = attrgetter("preemptions"), attrgetter("ttft_ns")

#: First tokens beyond this quantile are late. A second beyond it counts so many times more than one before it: the mean
#: and a tenth of the expected shortfall, whose weight is 1 / (1 - quantile) = 50.
_LATE_QUANTILE, _LATE_WEIGHT = 0.98, 5.0

#: Share by which the quantile's estimate moves: up for a late one, down by a fiftieth of that for another.
_STEP = 0.05


class Parameters(QueryParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Criterion for the best forecast, and number of candidates that are asked.

    Attributes:
        metric: The predicted time that shall be least: to the end, or to the first token.
        candidates: How many random candidates are asked; 0 for all.
        others_weight: Weight, 0 or more, of the delay that the request imposes on those already there against its own
            time, preemptions that it causes included. 2: in a steady state as many come while it is there as are
            there already. Of a request whose length nobody predicted it counts nothing: how long it stays is a guess.
        others_summed: ``preempting``: that delay is the mean over those already there, or their sum at every candidate
            where one of them is predicted to preempt; ``always``: the sum.
        ttft_weight: Weight, 0 or more, of the predicted time to the first token, added to ``e2e``: waiting counts more
            than decoding, as it says that memory is short there, which those who come later pay for too. What is
            beyond the 98th percentile of recent ones counts six times: it makes the tail.
    """

    metric: Literal["e2e", "ttft"] = "e2e"
    candidates: Annotated[int, msgspec.Meta(ge=0)] = 8
    others_weight: Annotated[float, msgspec.Meta(ge=0, le=1_000)] = 2.0
    others_summed: Literal["preempting", "always"] = "preempting"
    ttft_weight: Annotated[float, msgspec.Meta(ge=0, le=1_000)] = 20.0


class State(msgspec.Struct, frozen=True, gc=False):
    """Estimate of the tail of first tokens.

    Attributes:
        late_ns: A high quantile of the predicted time to the first token, over the placements of late; 0 before any.
    """

    late_ns: float = 0.0


def ask(view: DispatchView, parameters: Parameters, rng: Random) -> tuple[str, ...]:
    """As many random candidates as the parameters say; an only one, too: its prediction explains, and is judged."""
    return draw(view, parameters.candidates, rng)


def decide(
    view: DispatchView, parameters: Parameters, state: State, now_ns: int, rng: Random
) -> tuple[Decision, State]:
    """The best among those who have a prediction. An only candidate needs none; without any nothing is chosen."""
    if len(view.candidates) == 1 and not view.predictions:
        return pick_index(view, 0, "the only candidate"), state
    known = answered(view)
    predictions = [known.predictions[c.name] for c in known.candidates]
    if not predictions:
        return nothing(known), state
    end_to_end = parameters.metric == "e2e"
    weight = parameters.others_weight if view.expected_output_tokens is not None else 0.0
    summed = parameters.others_summed == "always" or any(map(_PREEMPTIONS, predictions))
    waiting = parameters.ttft_weight if end_to_end else 0.0
    # A prediction cannot know what the asker placed there after it had asked: each such sequence has its prefill first,
    # about as long as this one's own time to the first token. It keeps a burst, all of it asked about the same idle
    # instance, from going there as a whole. It counts once: the weight of waiting is for memory that is short, and a
    # burst's prefills are soon over.
    # The sum of the delays keeps an instance from filling up until it preempts. Short of that it crowds those with
    # short rests onto few instances, for the sake of the mean, and lengthens the tail.
    loads = [
        (
            (p.e2e_ns if end_to_end else p.ttft_ns)
            + p.placed_since * p.ttft_ns
            + weight * (p.others_delay_ns / (1 if summed else p.others or 1))
            + waiting * p.ttft_ns
        )
        / _MS
        for p in predictions
    ]
    unit = _unit(end_to_end, waiting, weight, summed)
    late_ns, late = state.late_ns, _LATE_WEIGHT * waiting
    if late and 0 < late_ns < max(map(_TTFT_NS, predictions)):
        loads = [load + late * max(0.0, p.ttft_ns - late_ns) / _MS for load, p in zip(loads, predictions, strict=True)]
        unit += f" + {late:g} x TTFT beyond {late_ns / _MS:.3g} ms"
    decision = pick_lowest(known, loads, rng, unit=unit)
    assert decision.chosen is not None  # there are predictions
    return decision, State(_late_after(late_ns, known.predictions[decision.chosen].ttft_ns))


def _late_after(late_ns: float, ttft_ns: int) -> float:
    """The quantile's estimate after one more first token. It settles where two of a hundred are above it."""
    if not late_ns:
        return float(ttft_ns)
    return late_ns * (1 + _STEP * ((ttft_ns > late_ns) - (1 - _LATE_QUANTILE)))


@lru_cache(maxsize=64)
def _unit(end_to_end: bool, waiting: float, weight: float, summed: bool) -> str:
    unit = "ms = predicted end to end" if end_to_end else "ms = predicted TTFT"
    if waiting:
        unit += f" + {waiting:g} x predicted TTFT"
    if weight:
        unit += f" + {weight:g} x {'' if summed else 'mean '}delay of other requests"
    return unit
