"""Sources of error in live predictions: each request is forecast again, with more and more known beforehand.

A forecast is made at the placement from the recorded snapshot that was the last one then. It is then
told what nobody could know: the pace that the engine came to have while the request was there, and the requests that
came later. The error that is left is the forecast's own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.status import StatusSnapshot
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.forecast import Candidate, Forecaster
from millrace.enginemodel.registered import scheduler_parameters

from bench.live.recording import Recording
from bench.live.reforecast import Asked, reforecasts
from bench.live.replay import engine_windows
from bench.live.step_fit import matrix, values

#: Fewest windows between snapshots that tell a pace.
PACE_WINDOWS_MIN = 3


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One request: what was measured, and what each forecast of it said. Pairs of TTFT and end to end, ns.

    Attributes:
        live: What the outcome carries; None where a fallback decided.
        again: What a predictor of this code says, to whom each message comes at once.
        alone: The forecast of its engine, without what outcomes taught the predictor.
        pace, later, both: The same, told the pace that the engine came to have, who came later, both.
    """

    measured: tuple[float, float]
    live: tuple[float, float] | None
    again: tuple[float, float]
    alone: tuple[float, float]
    pace: tuple[float, float]
    later: tuple[float, float]
    both: tuple[float, float]


class _Engine:
    """One engine of a run, as its snapshots and the outcomes tell of it afterwards."""

    def __init__(self, recording: Recording, name: str) -> None:
        record = next(each for each in recording.instances if each.instance == name)
        self._parameters = scheduler_parameters(record, prefix_caching=True)
        self._set = load_step_time(record.step_time)
        self._snapshots = sorted((s for s in recording.snapshots if s.instance == name), key=lambda s: s.at_ns)
        self._taken = [each.at_ns for each in self._snapshots]
        placed = [d for d in recording.decisions if d.chosen == name]
        self._placed = sorted(placed, key=lambda each: each.at_ns)
        self._ends = {o.request: o.arrival_ns + o.e2e_ns for o in recording.outcomes}
        self._reached = _reached(self._snapshots)
        rows = engine_windows(recording)[name]
        features, self._walls = matrix(rows) if rows else (np.zeros((0, 6)), np.zeros(0))
        self._modelled = features @ values(self._set)
        self._until = np.array([row.at_ns for row in rows])

    def pace(self, begin_ns: int, end_ns: int, otherwise: float) -> float:
        """Measured over modelled time of the steps in between."""
        among = (self._until > begin_ns) & (self._until - self._walls < end_ns)
        if among.sum() < PACE_WINDOWS_MIN:
            return otherwise
        return float(self._walls[among].sum() / self._modelled[among].sum())

    def forecast(self, decision: DecisionMade, *, scale: float, later: bool, transit_ns: int) -> tuple[float, float]:
        """From the last snapshot before the placement on."""
        snapshot = self._snapshots[max(0, bisect_right(self._taken, decision.at_ns) - 1)]
        forecaster = Forecaster(self._set.cost(self._parameters), self._parameters)
        forecaster.set_scale(scale)
        forecaster.load(snapshot)
        for other in self._pending(decision, snapshot, later=later):
            at_ns = self._reached.get(other.request, other.at_ns + transit_ns)
            forecaster.add(other.request, _candidate(other), max(at_ns, snapshot.at_ns))
        comes_ns = max(decision.at_ns + transit_ns, snapshot.at_ns)
        forecaster.advance(comes_ns)
        told = forecaster.forecast(_candidate(decision), with_delay=False)
        before_ns = comes_ns - decision.at_ns
        return told.ttft_ns + before_ns, told.e2e_ns + before_ns

    def _pending(self, decision: DecisionMade, snapshot: StatusSnapshot, *, later: bool) -> Iterator[DecisionMade]:
        """Placed here, on the way at the snapshot; and where ``later``, what came until the request ended."""
        shown = {entry.sequence.rpartition(".")[0] for entry in (*snapshot.running, *snapshot.waiting)}
        until_ns = self._ends[decision.request] if later else decision.at_ns
        first = bisect_left(self._placed, snapshot.at_ns - 100_000_000, key=lambda each: each.at_ns)
        for other in self._placed[first:]:
            if other.at_ns > until_ns:
                return
            ended = self._ends.get(other.request, 0) < snapshot.at_ns
            if other.request != decision.request and other.request not in shown and not ended:
                yield other


def told_again(recordings: Sequence[Recording]) -> list[Told]:
    """Every placement with a forecast of this code; needs lengths that were stated."""
    found = []
    for recording, answers in reforecasts(recordings):
        engines = {record.instance: _Engine(recording, record.instance) for record in recording.instances}
        outcomes = {o.request: o for o in recording.outcomes if o.outcome == "completed" and o.ttft_ns is not None}
        for decision in recording.decisions:
            outcome, asked = outcomes.get(decision.request), answers.get(decision.request)
            if outcome is not None and asked is not None:
                found.append(_told(engines, decision, outcome, asked))
    return found


def _told(engines: Mapping[str, _Engine], decision: DecisionMade, outcome: RequestFinished, asked: Asked) -> Told:
    engine, before_ns = engines[decision.chosen], outcome.placed_ns - outcome.arrival_ns
    end_ns = outcome.arrival_ns + outcome.e2e_ns
    pace = engine.pace(decision.at_ns, end_ns, asked.scale)
    ways = {"transit_ns": asked.transit_ns}
    predicted = outcome.predicted_ttft_ns, outcome.predicted_e2e_ns
    return Told(
        measured=((outcome.ttft_ns or 0) - before_ns, outcome.e2e_ns - before_ns),
        live=None if predicted[0] is None or predicted[1] is None else (predicted[0], predicted[1]),
        again=(asked.answer.ttft_ns, asked.answer.e2e_ns),
        alone=engine.forecast(decision, scale=asked.scale, later=False, **ways),
        pace=engine.forecast(decision, scale=pace, later=False, **ways),
        later=engine.forecast(decision, scale=asked.scale, later=True, **ways),
        both=engine.forecast(decision, scale=pace, later=True, **ways),
    )


def _candidate(decision: DecisionMade) -> Candidate:
    return Candidate(
        prompt_tokens=decision.prompt_tokens,
        output_tokens=decision.output_tokens,
        expected_output_tokens=max(1, round(decision.expected_output_tokens or decision.max_tokens)),
        max_tokens=decision.max_tokens,
        sequences=len(decision.sequences),
    )


def _reached(snapshots: Sequence[StatusSnapshot]) -> dict[str, int]:
    """Return the time at which each request came to its worker, unix ns."""
    found: dict[str, int] = {}
    for snapshot in snapshots:
        for entry in (*snapshot.running, *snapshot.waiting):
            found.setdefault(entry.sequence.rpartition(".")[0], entry.arrival_ns)
    return found
