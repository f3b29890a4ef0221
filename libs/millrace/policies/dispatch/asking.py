"""For policies that have candidates predicted before they decide: their parameters, who is asked, who answered.

The asker (ingress) carries the question out and keeps its deadline; a policy only names candidates and reads
``view.predictions``. Its parameters extend ``QueryParameters``.
"""

from __future__ import annotations

from random import Random
from typing import Annotated

import msgspec

from millrace.contracts.observers import CandidateScore
from millrace.policies.dispatch.view import DispatchView

#: Note of a candidate that was left out.
UNPREDICTED = "no prediction"


class QueryParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters for asking predictors, the same for every policy that asks them.

    Attributes:
        deadline_ms: Then whoever has answered is decided among, milliseconds.
        fallback: Policy that decides where nobody answered in time; one that asks nobody itself.
        pause_s: After three questions in a row without any answer nobody is asked for so long, seconds.
        forecasts_per_s: Forecasts of one model that an ingress asks for per second; beyond it each placement asks about
            fewer of the candidates that the policy named, two at least. 0 for no bound.
    """

    deadline_ms: Annotated[float, msgspec.Meta(gt=0, le=10_000)] = 20.0
    fallback: str = "join_shortest_queue"
    pause_s: Annotated[float, msgspec.Meta(ge=0, le=3_600)] = 1.0
    forecasts_per_s: Annotated[float, msgspec.Meta(ge=0)] = 4_000.0


def draw(view: DispatchView, count: int, rng: Random) -> tuple[str, ...]:
    """``count`` random candidates in the view's order; all of them where there are no more, or ``count`` is 0."""
    candidates = view.candidates
    if not count or count >= len(candidates):
        return tuple([c.name for c in candidates])
    return tuple([candidates[i].name for i in sorted(rng.sample(range(len(candidates)), count))])


def answered(view: DispatchView) -> DispatchView:
    """The view with those candidates only that have a prediction; the others are filtered, with a note."""
    predictions = view.predictions
    if len(predictions) == len(view.candidates):
        return view
    silent = [CandidateScore(c.name, 0.0, UNPREDICTED) for c in view.candidates if c.name not in predictions]
    return msgspec.structs.replace(
        view,
        candidates=tuple(c for c in view.candidates if c.name in predictions),
        filtered=(*view.filtered, *silent),
    )
