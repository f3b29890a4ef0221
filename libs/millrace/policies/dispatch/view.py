"""Input and output of a dispatch policy.

A view is a frozen snapshot. The owner of the state keeps one ``InstanceView`` per instance. It replaces that view when
a summary comes or when it places something there itself, so a decision copies only a tuple of references.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from operator import attrgetter

import msgspec

from millrace.contracts.observers import CandidateForecast, CandidateScore


class InstanceView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One candidate: its last InstanceSummary and what the asker placed there that the summary cannot know yet.

    Attributes:
        known: False where no summary was heard: every count of the summary is then 0 and only ``in_flight_*`` speak.
        running: Sequences in the running batch.
        waiting: Sequences in the queue.
        running_tokens: Context tokens of the running batch.
        waiting_prefill_tokens: Tokens that the queue still has to prefill.
        used_tokens: KV memory in use, tokens (used blocks times block size).
        total_tokens: KV memory in all, tokens; 0 where unknown.
        sequences_max: Bound of the running batch; 0 where unknown.
        in_flight_sequences: Placed by this asker, not yet in a summary.
        in_flight_tokens: Their prompt tokens and tokens to recompute.
    """

    name: str
    known: bool = False
    running: int = 0
    waiting: int = 0
    running_tokens: int = 0
    waiting_prefill_tokens: int = 0
    used_tokens: int = 0
    total_tokens: int = 0
    in_flight_sequences: int = 0
    in_flight_tokens: int = 0
    sequences_max: int = 0

    @property
    def batch_full(self) -> bool:
        """Whether one more sequence would wait for a place in the running batch, however little memory it needs."""
        return 0 < self.sequences_max <= self.running + self.waiting + self.in_flight_sequences


_NAME = attrgetter("name")

#: A few names are looked for one by one where there are more than so many candidates for each.
SEARCHED_MIN = 16


def named_views(candidates: Sequence[InstanceView], names: Collection[str]) -> tuple[InstanceView, ...]:
    """Those of the candidates, which are in order of name, that have one of these names. Two of a thousand cost as much
    as two of a hundred.
    """
    if len(names) * SEARCHED_MIN > len(candidates):
        return tuple([c for c in candidates if c.name in names])
    places = sorted({bisect_left(candidates, name, key=_NAME) for name in names})
    return tuple([c for c in (candidates[place] for place in places if place < len(candidates)) if c.name in names])


#: Answer of a predictor for one candidate, as policies read it and decisions publish it.
Prediction = CandidateForecast


class DispatchView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One question: where shall these sequences go?

    Attributes:
        sequences: How many are placed together (the choices of one prompt).
        length_tokens: Prompt and output tokens of one of them so far.
        expected_output_tokens: Predicted mean of the whole output; None if unknown.
        candidates: Those that may take it, in order of name.
        filtered: Those that may not, each with a note why.
        predictions: By name, for those that were asked and answered; empty where the policy asks nobody.
    """

    model: str
    sequences: int
    length_tokens: int
    candidates: tuple[InstanceView, ...]
    expected_output_tokens: float | None = None
    filtered: tuple[CandidateScore, ...] = ()
    predictions: dict[str, Prediction] = {}


class Decision(msgspec.Struct, frozen=True, gc=False):
    """An answer.

    Attributes:
        chosen: Instance, or None where there is no candidate.
        reason: One sentence with units.
        scores: At most SCORES_MAX of the best, the chosen one among them; 1 is best, 0 worst of all candidates.
    """

    chosen: str | None
    reason: str
    scores: list[CandidateScore]
