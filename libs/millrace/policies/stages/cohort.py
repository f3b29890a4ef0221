"""Lengths of the requests that arrived in a period, those that still run included.

Requests that have ended are short ones first: a while after a start, or after a change, hardly a long one is among
them. Here every arrival of the period counts, so that the rate is that of arrivals. Who has ended has a length; who
still runs has one of the lengths that sequences have which got as far (Kaplan and Meier, 1958). How
far it got follows from its age and the pace of the cluster.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from millrace.policies.stages.statistics import LengthStatistics, statistics_of

#: Arrivals that are kept: at 50 a second those of five minutes.
ARRIVALS_MAX = 16_384

#: Of those, so many go into the statistics, evenly drawn: that takes 30 ms.
STATISTICS_MAX = 4_096

#: Fewer ends say nothing.
ENDS_MIN = 20

#: The rate at which sequences end beyond the longest seen is that beyond this part of it.
_TAIL_FROM = 0.25

#: Successive multiples of it modulo 1 spread evenly.
_GOLDEN = 0.618033988749895


@dataclass(slots=True, eq=False)
class FollowedRequest:
    """One request; times in unix ns, lengths in tokens.

    Attributes:
        began: Tokens that a sequence which ran from the beginning would have generated when this one came.
        outputs: Of its choices; empty while it runs.
        gone: It ended without output.
    """

    request: str
    arrival_ns: int
    prompt: int
    max_tokens: int
    choices: int
    began: float
    cached: int = 0
    outputs: tuple[int, ...] = ()
    gone: bool = False


@dataclass
class ArrivalCohort:
    """Requests of one model, in order of arrival; sole owner.

    Attributes:
        arrived: The last ones.
        open: Those that run, by request.
        generated: Tokens that a sequence which runs all the time has generated: the integral of the mean pace.
    """

    arrived: deque[FollowedRequest] = field(default_factory=deque)
    open: dict[str, FollowedRequest] = field(default_factory=dict)
    generated: float = 0.0
    since_ns: int = 0

    def arrive(self, request: str, *, prompt: int, max_tokens: int, choices: int, now_ns: int) -> None:
        """Takes a request that was placed for the first time; another placement of it changes nothing."""
        if request in self.open or prompt <= 0 or choices < 1:
            return
        self.since_ns = self.since_ns or now_ns
        made = FollowedRequest(request, now_ns, prompt, max_tokens, choices, self.generated)
        self.arrived.append(made)
        self.open[request] = made
        if len(self.arrived) > ARRIVALS_MAX:
            self._drop_first()

    def end(self, request: str, *, outputs: tuple[int, ...], cached: int) -> None:
        """Take the lengths of a request that ended; of one that is not followed, nothing."""
        followed = self.open.pop(request, None)
        if followed is not None:
            followed.outputs, followed.cached = tuple(each for each in outputs if each > 0), cached
            followed.gone = not followed.outputs

    def progress(self, tokens: float) -> None:
        """Every running sequence has generated so many more, on average."""
        self.generated += max(0.0, tokens)

    def forget(self, before_ns: int) -> None:
        """Drops arrivals before that time; who of them runs, counts no more."""
        while self.arrived and self.arrived[0].arrival_ns < before_ns:
            self._drop_first()
        self.since_ns = max(self.since_ns, before_ns) if self.since_ns else 0

    def _drop_first(self) -> None:
        first = self.arrived.popleft()
        self.since_ns = max(self.since_ns, first.arrival_ns)
        self.open.pop(first.request, None)

    def statistics(self, now_ns: int) -> LengthStatistics | None:
        """Of all arrivals; None while too few have ended."""
        ended = [each for each in self.arrived if each.outputs]
        running = list(self.open.values())
        if len(ended) < ENDS_MIN:
            return None
        rows = [row for each in ended for row in _rows(each, each.outputs)]
        for each, final in zip(running, self._finals(ended, running), strict=True):
            rows += _rows(each, (final,) * each.choices)
        stride = -(-len(rows) // STATISTICS_MAX)
        kept = rows[::stride]
        span_s = max(1e-3, (now_ns - self.since_ns) / 1e9) * len(kept) / len(rows)
        prompts, outputs, cached = zip(*kept, strict=True)
        return statistics_of(prompts, outputs, cached=cached, span_s=span_s)

    def _generated(self, followed: FollowedRequest) -> int:
        return min(max(0, followed.max_tokens - 1), int(self.generated - followed.began))

    def _finals(self, ended: Sequence[FollowedRequest], running: Sequence[FollowedRequest]) -> list[int]:
        """Final lengths of running ones: each takes another part of its distribution, so that together they are it."""
        if not running:
            return []
        known = [output for each in ended for output in each.outputs]
        seen = [self._generated(each) for each in running for _ in range(each.choices)]
        curve = _Curve(known, seen)
        finals = [0] * len(running)
        order = sorted(range(len(running)), key=lambda index: self._generated(running[index]))
        for rank, index in enumerate(order):
            each = running[index]
            final = curve.final(self._generated(each), rank * _GOLDEN % 1.0)
            finals[index] = max(1, min(each.max_tokens, round(final)))
        return finals


class _Curve:
    """Kaplan-Meier estimate of the share of sequences that are longer; beyond the longest seen, exponential."""

    def __init__(self, ended: Sequence[int], running: Sequence[int]) -> None:
        lengths = np.asarray([*ended, *running], dtype=np.float64)
        ends = np.asarray([1.0] * len(ended) + [0.0] * len(running))
        order = np.lexsort((-ends, lengths))
        self._lengths, ends = lengths[order], ends[order]
        self._alive = np.cumprod(1 - ends / np.arange(len(ends), 0, -1))
        upper = self._lengths[-1] * _TAIL_FROM
        self._tail = max(1.0, float(np.maximum(0.0, self._lengths - upper).sum())) / max(
            1.0, float(ends[self._lengths > upper].sum())
        )

    def final(self, tokens: int, share: float) -> float:
        """Length at which this share of those that got so far has ended, 0 <= share < 1."""
        behind = int(np.searchsorted(self._lengths, tokens, side="right"))
        level = (1 - share) * (float(self._alive[behind - 1]) if behind else 1.0)
        index = max(behind, int(np.searchsorted(-self._alive, -level)))
        if index < len(self._lengths):
            return float(self._lengths[index])
        left = float(self._alive[-1])
        return float(max(tokens, self._lengths[-1])) + self._tail * max(0.0, math.log(max(left, 1e-12) / level))


def _rows(followed: FollowedRequest, outputs: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(prompt, output, cached) of each choice: those after the first find the prompt in the cache."""
    first = (followed.prompt, outputs[0], followed.cached)
    return [first, *((followed.prompt, output, followed.prompt) for output in outputs[1:])]
