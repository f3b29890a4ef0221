"""Keeps what is known of one instance between questions, and answers them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import msgspec

from millrace.contracts.kv import blocks_for
from millrace.contracts.predictor import Forecast
from millrace.contracts.sequences import request_id_of
from millrace.contracts.status import StatusSnapshot
from millrace.enginemodel.forecast.native import native_cost, native_limits
from millrace.enginemodel.forecast.present import LengthRevision, cached_of
from millrace.enginemodel.forecast.question import Candidate, JoinForecast, LeaveForecast, LoadForecast
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import StepCost
from millrace.native import enginemodel

NOTHING_CACHED: Mapping[str, int] = {}

#: A candidate that the instance was given and does not show yet; when, unix ns (what lies before the snapshot counts as
#: its moment); and what the compiled module takes of it besides.
Placement = tuple[Candidate, int, tuple[int, int, int, int, int]]

#: Moments of a curve, at most: each costs a look at every sequence.
POINTS_MAX = 1024


class Forecaster:
    """The last snapshot of one instance and the placements since, rolled on in the compiled module.

    Answers are for the last loaded snapshot, the scaled cost, the time of the last ``advance`` and the placements in
    the order of ``add``.
    """

    def __init__(self, cost: StepCost, parameters: EngineParameters, *, default_output_tokens: int = 128) -> None:
        """Args: default_output_tokens: Assumed where no length was predicted."""
        self.parameters = parameters
        self._cost = native_cost(cost)
        self._lengths = LengthRevision(
            default_output_tokens=default_output_tokens, max_model_len=parameters.max_model_len
        )
        self._scale = 1.0
        self._budget = parameters.token_budget
        self._native = self._made(parameters)
        self._snapshot: StatusSnapshot | None = None
        self._cached = NOTHING_CACHED
        self._placements: dict[str, Placement] = {}
        self._placed = 0  # so many of them, the first ones, the compiled module has; -1: it has some that are gone
        self._at_ns = self._now_ns = 0

    def _made(self, parameters: EngineParameters) -> enginemodel.Forecaster:
        made = enginemodel.Forecaster(native_limits(parameters), self._cost, self._lengths.default_output_tokens)
        made.set_scale(self._scale)
        return made

    def load(self, snapshot: StatusSnapshot, cached: Mapping[str, int] = NOTHING_CACHED) -> None:
        """Starts again from a snapshot. Placements that it shows are known no longer.

        Args:
            snapshot: Right after a step.
            cached: By sequence, tokens of waiting ones that are in the prefix cache; those of others do not matter.

        Raises:
            ValueError: no engine can be in that state. Nothing is loaded then.
        """
        self._snapshot, self._placed = None, 0
        if self._placements:
            shown = {status.sequence for row in (snapshot.running, snapshot.waiting) for status in row}
            requests = {request_id_of(sequence) for sequence in shown}
            kept = {key: each for key, each in self._placements.items() if key not in shown and key not in requests}
            self._placements = kept
        self._cached = cached
        self._restart(snapshot)
        self._snapshot = snapshot

    def _restart(self, snapshot: StatusSnapshot) -> None:
        self._set_budget(snapshot.token_budget)
        cached, waiting = self._cached, snapshot.waiting
        hits = [cached_of(status, cached) for status in waiting] if cached else None
        leave_at = self._lengths.leave_at_tokens
        self._native.load(snapshot.running, waiting, snapshot.blocks_free, hits, leave_at)
        self._at_ns, self._placed = snapshot.at_ns, 0

    def _current(self) -> enginemodel.Forecaster:
        """The compiled forecaster with the placements as they are now. One that goes costs nothing until here."""
        if self._placed < 0:
            assert self._snapshot is not None
            self._restart(self._snapshot)
        if self._placed < len(self._placements):
            for _, at_ns, figures in islice(self._placements.values(), self._placed, None):
                self._native.place(at_ns - self._at_ns, *figures)
            self._placed = len(self._placements)
        return self._native

    def _set_budget(self, told: int) -> None:
        """Takes the token budget that a snapshot tells, which is taken to stay; 0 for the engine's own."""
        own = self.parameters
        budget = told if 0 < told < own.token_budget and own.chunked_prefill else own.token_budget
        if budget != self._budget:
            self._budget = budget
            self._native = self._made(msgspec.structs.replace(own, token_budget=budget))

    def _placement(self, candidate: Candidate, at_ns: int) -> Placement:
        lengths = candidate.prompt_tokens, candidate.output_tokens, self._lengths.of_placement(candidate)
        return candidate, at_ns, (*lengths, candidate.sequences, candidate.cached_tokens)

    def add(self, key: str, candidate: Candidate, at_ns: int) -> None:
        """Counts a placement in that the snapshot does not show yet; one that the engine would refuse is ignored.

        Args:
            key: A sequence id, or a request id for all of its sequences.
        """
        known = self._placements.get(key)
        if known is not None and known[0] is candidate:  # at another time: who loads a snapshot says all of them again
            del self._placements[key]
            self._placements[key] = candidate, at_ns, known[2]
            self._placed = -1 if self._placed else 0
            return
        if candidate.refusal(self.parameters) is not None:
            return
        self.forget(key)
        self._placements[key] = self._placement(candidate, at_ns)

    def forget(self, key: str) -> None:
        """Drops a placement: it was withdrawn or refused, or ended before any snapshot showed it."""
        if self._placements.pop(key, None) is not None and self._placed:
            self._placed = -1

    def set_scale(self, scale: float) -> None:
        """Stretches all step times. Raises ValueError where ``scale`` is not positive and finite."""
        self._native.set_scale(scale)
        self._scale = scale

    def set_leave_at(self, tokens: int) -> None:
        """Says at which length, prompt and output, sequences leave the instance: its stage's upper boundary.

        Args: tokens: 0 for never. Those that are as long already stay to their end, and so does whoever is asked about.
        """
        if tokens == self._lengths.leave_at_tokens:
            return
        self._lengths = msgspec.structs.replace(self._lengths, leave_at_tokens=tokens)
        self._placements = {key: self._placement(*each[:2]) for key, each in self._placements.items()}
        if self._snapshot is not None:
            self._placed = -1

    def advance(self, now_ns: int) -> None:
        self._now_ns = now_ns

    def forecast(self, candidate: Candidate, *, with_delay: bool = True) -> Forecast:
        """Answers for a candidate that comes now. Needs a snapshot, and a candidate that the engine would take.

        Args:
            candidate: ``candidate.refusal(parameters)`` must be None.
            with_delay: Whether ``others_delay_ns`` is wanted, which is half of the work; else it is 0.
        """
        figures = self.figures(candidate, with_delay=with_delay)
        return Forecast(**dict(zip(Forecast.__struct_fields__, figures, strict=True)))

    def figures(self, candidate: Candidate, *, with_delay: bool = True) -> tuple[int, ...]:
        """The fields of ``forecast`` in their order."""
        final_tokens = self._lengths.of_candidate(candidate)
        return *self._current().ask(
            self._now_ns - self._at_ns,
            candidate.prompt_tokens,
            candidate.output_tokens,
            final_tokens,
            candidate.sequences,
            candidate.cached_tokens,
            with_delay,
        ), final_tokens

    def curve(self, horizon_ns: int, points: int = 16) -> LoadForecast:
        """Says how loaded the instance will be if no other request comes. Needs a snapshot.

        Args:
            horizon_ns: From now to the last moment.
            points: Evenly spaced moments, now and the last one included.

        Raises:
            ValueError: fewer than 2 points, far too many, or a horizon below 0.
        """
        if horizon_ns < 0 or not 2 <= points <= POINTS_MAX:
            raise ValueError(f"a curve has 2 to {POINTS_MAX} points over a horizon of at least 0 ns")
        spacing_ns = horizon_ns // (points - 1)
        rows = self._current().curve(self._now_ns - self._at_ns, spacing_ns, points)
        tokens, blocks, running, waiting, others, preemptions = zip(*rows, strict=True)
        return LoadForecast(
            spacing_ns=spacing_ns,
            tokens=tokens,
            blocks=blocks,
            running=running,
            waiting=waiting,
            ended=tuple(others[0] - left for left in others),
            preemptions=tuple(count - preemptions[0] for count in preemptions),
            blocks_total=self._blocks_total(),
        )

    def _blocks_total(self) -> int:
        """Blocks free and in use (shared ones for each), no fewer than one sequence of ``max_model_len`` needs."""
        assert self._snapshot is not None, "no snapshot was loaded"
        held = sum(status.blocks for row in (self._snapshot.running, self._snapshot.waiting) for status in row)
        own = self.parameters
        needed = blocks_for(own.max_model_len, own.block_size, own.groups)
        return max(self._snapshot.blocks_free + held, needed)

    def leave(self, sequence: str) -> LeaveForecast | None:
        """Says what the others gain if a sequence goes at the end of the step under way. Needs a snapshot.

        Returns: None where the snapshot does not show it, or it has ended before now.
        """
        assert self._snapshot is not None, "no snapshot was loaded"
        shown = (*self._snapshot.running, *self._snapshot.waiting)
        position = next((index for index, status in enumerate(shown) if status.sequence == sequence), None)
        answer = None if position is None else self._current().leave(self._now_ns - self._at_ns, position)
        if position is None or answer is None:
            return None
        relieved_ns, preemptions_avoided, others, rest_ns = answer
        return LeaveForecast(
            relieved_ns=relieved_ns,
            preemptions_avoided=preemptions_avoided,
            others=others,
            rest_ns=rest_ns,
            rest_tokens=self._lengths.of_sequence(shown[position]) - shown[position].output_tokens,
        )

    def join(self, candidate: Candidate, *, at_ns: int | None = None) -> JoinForecast:
        """Says what the others lose if a sequence comes with its KV, all but its last token. Needs a snapshot.

        Args:
            candidate: One sequence; ``candidate.refusal(parameters)`` must be None. ``cached_tokens`` has no effect.
            at_ns: When its KV could be there at the earliest, unix ns; None for now.
        """
        comes_ns = self._now_ns if at_ns is None else max(at_ns, self._now_ns)
        final_tokens = self._lengths.of_candidate(candidate)
        delay, preemptions, others, blocks, start, e2e, pace = self._current().join(
            self._now_ns - self._at_ns,
            comes_ns - self._at_ns,
            candidate.prompt_tokens,
            candidate.output_tokens,
            final_tokens,
        )
        return JoinForecast(
            others_delay_ns=delay,
            preemptions=preemptions,
            others=others,
            blocks_peak=blocks,
            start_ns=start,
            e2e_ns=e2e,
            pace_ns=pace,
            output_tokens=final_tokens,
        )
