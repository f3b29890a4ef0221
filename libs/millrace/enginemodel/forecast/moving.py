"""Load to come, and what a sequence that goes or comes does to the others, in plain Python.

``native/`` is held to exact agreement with it.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import msgspec

from millrace.enginemodel.forecast.future import Future, FutureStep, arrivals, sequences_of
from millrace.enginemodel.forecast.future_sequence import FutureSequence
from millrace.enginemodel.forecast.known import ForecastInput
from millrace.enginemodel.forecast.question import (
    Candidate,
    JoinForecast,
    LeaveForecast,
    LoadForecast,
    Placement,
)
from millrace.enginemodel.step_cost import FS_PER_NS

#: Moments of a curve, at most: each costs a look at every sequence.
POINTS_MAX = 1024


class Rolled(msgspec.Struct, frozen=True, kw_only=True):
    """A future that was rolled to its end.

    Attributes:
        placed: Sequences of the pending placements.
    """

    future: Future
    placed: list[FutureSequence]

    @property
    def ends_fs(self) -> list[int]:
        """End of each sequence that is present or on its way, fs; in the order of the snapshot, then of arrival."""
        return [each.token_fs[-1] for each in (*self.future.present.values(), *self.placed)]

    @property
    def preemptions(self) -> int:
        """All of them."""
        return sum(step.preempted for step in self.future.steps)


def curve(state: ForecastInput, horizon_ns: int, points: int) -> LoadForecast:
    """The load over ``horizon_ns`` from now on, both ends included. Raises ValueError for what is no curve."""
    check_curve(horizon_ns, points)
    spacing_ns = horizon_ns // (points - 1)
    rolled = _rolled(state)
    moments = [state.now_fs + index * spacing_ns * FS_PER_NS for index in range(points)]
    states = [_state_at(rolled.future, moment) for moment in moments]
    ends = sorted(end for end in rolled.ends_fs if end >= state.now_fs)
    begun = [step.begin_fs for step in rolled.future.steps]
    preempted = [0, *accumulate(step.preempted for step in rolled.future.steps)]
    counts = [preempted[bisect_left(begun, moment)] for moment in moments]
    return LoadForecast(
        spacing_ns=spacing_ns,
        tokens=tuple(each.tokens for each in states),
        blocks=tuple(each.blocks for each in states),
        running=tuple(each.running for each in states),
        waiting=tuple(each.waiting for each in states),
        ended=tuple(bisect_left(ends, moment) for moment in moments),
        preemptions=tuple(count - counts[0] for count in counts),
        blocks_total=rolled.future.blocks_total,
    )


def check_curve(horizon_ns: int, points: int) -> None:
    """Raises ValueError for what is no curve."""
    if horizon_ns < 0 or not 2 <= points <= POINTS_MAX:
        raise ValueError(f"a curve has 2 to {POINTS_MAX} points over a horizon of at least 0 ns")


def leave(state: ForecastInput, sequence: str) -> LeaveForecast | None:
    """Forecast the gain of the other sequences if one of the snapshot leaves.

    Returns None if that sequence is not there, or has ended before now.
    """
    stays, goes = _rolled(state), _rolled(state, leaver=sequence)
    leaver = stays.future.present.get(sequence)
    if leaver is None or leaver.token_fs[-1] < state.now_fs:
        return None
    own = list(stays.future.present).index(sequence)
    others = [(with_, without) for with_, without in _pairs(stays.ends_fs, goes, own) if with_ >= state.now_fs]
    return LeaveForecast(
        relieved_ns=sum(with_ - without for with_, without in others) // FS_PER_NS,
        preemptions_avoided=stays.preemptions - goes.preemptions,
        others=len(others),
        rest_ns=leaver.token_fs[-1] // FS_PER_NS - state.now_fs // FS_PER_NS,
        rest_tokens=len(leaver.token_fs),
    )


def _pairs(stays: list[int], goes: Rolled, own: int) -> list[tuple[int, int]]:
    """The others' ends, with and without the sequence of this index."""
    sequences = [*goes.future.present.values(), *goes.placed]
    without = [each.token_fs[-1] if index != own else 0 for index, each in enumerate(sequences)]
    return [pair for index, pair in enumerate(zip(stays, without, strict=True)) if index != own]


def join(state: ForecastInput, candidate: Candidate, *, at_ns: int) -> JoinForecast:
    """Forecast the loss of the other sequences if one comes with the KV of all but its last token.

    Args:
        candidate: ``refusal(parameters)`` must be None, and ``sequences`` 1; ``cached_tokens`` has no effect.
        at_ns: When its KV could be there, unix ns; not before now.
    """
    final_tokens = state.lengths.of_candidate(candidate)
    arrives_ns = max(at_ns, state.now_ns)
    comer = sequences_of(Placement(candidate, arrives_ns), state.snapshot.at_ns, final_tokens=final_tokens)[0]
    without, joined = _rolled(state), _rolled(state, comer=comer)
    others = [(later, end) for later, end in zip(joined.ends_fs, without.ends_fs, strict=True) if end >= state.now_fs]
    started_fs, last_fs = comer.started_fs, comer.token_fs[-1]
    assert started_fs is not None, "whoever came ends"
    steps = [step for step in joined.future.steps if started_fs <= step.begin_fs < last_fs]
    return JoinForecast(
        others_delay_ns=sum(later - end for later, end in others) // FS_PER_NS,
        preemptions=joined.preemptions - without.preemptions,
        others=len(others),
        blocks_peak=max(step.blocks for step in steps),
        start_ns=started_fs // FS_PER_NS - state.now_fs // FS_PER_NS,
        e2e_ns=last_fs // FS_PER_NS - state.now_fs // FS_PER_NS,
        pace_ns=(last_fs - started_fs) // len(comer.token_fs) // FS_PER_NS,
        output_tokens=final_tokens,
    )


def _rolled(state: ForecastInput, *, leaver: str = "", comer: FutureSequence | None = None) -> Rolled:
    placed = arrivals(state.pending, state.snapshot.at_ns, state.lengths)
    future = Future(state, placed)
    if leaver in future.present:
        future.remove(future.present[leaver], state.now_fs)
    if comer is not None:
        future.bring(comer)
    future.run()
    return Rolled(future=future, placed=placed)


def _state_at(future: Future, moment_fs: int) -> FutureStep:
    """The instance in the last step begun before the moment; idle where that has ended before it."""
    index = bisect_left(future.steps, moment_fs, key=lambda step: step.begin_fs) - 1
    if index < 0:
        return future.initial
    step = future.steps[index]
    idle = step.end_fs < moment_fs
    return future.idle if idle else step
