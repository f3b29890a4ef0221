"""Keeps what is known of one instance between questions, and answers them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from millrace.contracts.sequences import request_id_of
from millrace.contracts.status import StatusSnapshot
from millrace.enginemodel.forecast.future import counting, in_force
from millrace.enginemodel.forecast.known import NOTHING_CACHED, ForecastInput
from millrace.enginemodel.forecast.moving import curve, join, leave
from millrace.enginemodel.forecast.native import NATIVE, NativeFuture, compiled_for
from millrace.enginemodel.forecast.present import LengthRevision, check_snapshot
from millrace.enginemodel.forecast.question import (
    Candidate,
    Forecast,
    JoinForecast,
    LeaveForecast,
    LoadForecast,
    Placement,
)
from millrace.enginemodel.forecast.reference import forecast_of
from millrace.enginemodel.forecast.scaling import scaled
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import StepCost


class Forecaster:
    """The last snapshot of one instance and the placements since.

    Its answers are those of ``reference.forecast`` and of ``moving`` for the last loaded snapshot, the scaled cost, the
    time of the last ``advance`` and the placements in the order of ``add``.
    """

    def __init__(
        self,
        cost: StepCost,
        parameters: EngineParameters,
        *,
        default_output_tokens: int = 128,
        native: bool = NATIVE,
    ) -> None:
        """Args: native: whether the compiled module answers; the reference gives the same numbers, slowly."""
        self.parameters = parameters
        self._cost = cost
        self._scaled = cost
        self._lengths = LengthRevision(
            default_output_tokens=default_output_tokens, max_model_len=parameters.max_model_len
        )
        self._native = NativeFuture(cost, parameters, self._lengths) if native and compiled_for(parameters) else None
        self._scale = 1.0
        self._native_budget = parameters.token_budget
        self._snapshot: StatusSnapshot | None = None
        self._cached = NOTHING_CACHED
        self._placements: dict[str, Placement] = {}
        self._now_ns = 0

    @property
    def loaded(self) -> bool:
        """Whether there is a snapshot, without which nothing can be asked."""
        return self._snapshot is not None

    @property
    def placements(self) -> list[str]:
        """Keys of the placements that no snapshot has shown yet, in the order of ``add``."""
        return list(self._placements)

    def load(self, snapshot: StatusSnapshot, cached: Mapping[str, int] = NOTHING_CACHED) -> None:
        """Starts again from a snapshot. Placements that it shows are known no longer.

        Args:
            snapshot: Right after a step.
            cached: By sequence, tokens of waiting ones that are in the prefix cache; those of others do not matter.

        Raises:
            ValueError: no engine can be in that state. Nothing is loaded then.
        """
        self._snapshot = None
        if self._native is None:
            check_snapshot(snapshot)
        if self._placements:
            shown = {status.sequence for row in (snapshot.running, snapshot.waiting) for status in row}
            requests = {request_id_of(sequence) for sequence in shown}
            kept = {key: each for key, each in self._placements.items() if key not in shown and key not in requests}
            self._placements = kept
        self._cached = cached
        self._restart(snapshot)
        self._snapshot = snapshot

    def _restart(self, snapshot: StatusSnapshot) -> None:
        """Tells the compiled module everything anew."""
        if self._native is not None:
            native = self._native_for(self._native, snapshot)
            native.load(snapshot, self._cached)
            for placement in self._placements.values():
                native.place(placement)

    def _native_for(self, native: NativeFuture, snapshot: StatusSnapshot) -> NativeFuture:
        """The compiled module with the token budget in force, which it takes when it is made."""
        parameters = in_force(self.parameters, snapshot)
        if parameters.token_budget == self._native_budget:
            return native
        self._native_budget = parameters.token_budget
        self._native = native = NativeFuture(self._cost, parameters, self._lengths)
        native.set_scale(self._scale)
        return native

    def add(self, key: str, candidate: Candidate, at_ns: int) -> None:
        """Counts a placement in that the snapshot does not show yet; one that the engine would refuse is ignored.

        Args:
            key: A sequence id, or a request id for all of its sequences.
            candidate: What was placed.
            at_ns: When, unix ns.
        """
        if candidate.refusal(self.parameters) is not None:
            return
        self.forget(key)
        placement = self._placements[key] = Placement(candidate, at_ns)
        if self._native is not None and self._snapshot is not None:
            self._native.place(placement)

    def forget(self, key: str) -> None:
        """Drops a placement: it was withdrawn or refused, or ended before any snapshot showed it."""
        if self._placements.pop(key, None) is not None and self._snapshot is not None:
            self._restart(self._snapshot)

    def set_scale(self, scale: float) -> None:
        """Stretches all step times. Raises ValueError where ``scale`` is not positive and finite."""
        self._scaled, self._scale = scaled(self._cost, scale), scale
        if self._native is not None:
            self._native.set_scale(scale)

    def set_leave_at(self, tokens: int) -> None:
        """Says at which length, prompt and output, sequences leave the instance: its stage's upper boundary.

        Args: tokens: 0 for never. Those that are as long already stay to their end, and so does whoever is asked about.
        """
        if tokens == self._lengths.leave_at_tokens:
            return
        self._lengths = msgspec.structs.replace(self._lengths, leave_at_tokens=tokens)
        if self._native is not None:
            self._native.set_lengths(self._lengths)
        if self._snapshot is not None:
            self._restart(self._snapshot)

    def advance(self, now_ns: int) -> None:
        """Says what time it is, unix ns."""
        self._now_ns = now_ns

    def forecast(self, candidate: Candidate, *, with_delay: bool = True) -> Forecast:
        """Answers for a candidate that comes now. Needs a snapshot, and a candidate that the engine would take.

        Args:
            candidate: ``candidate.refusal(parameters)`` must be None.
            with_delay: Whether ``others_delay_ns`` is wanted, which is half of the work; else it is 0.
        """
        assert self._snapshot is not None, "no snapshot was loaded"
        if self._native is not None:
            return self._native.forecast(candidate, now_ns=self._now_ns, with_delay=with_delay)
        answer = forecast_of(self._known(), candidate)
        return answer if with_delay else msgspec.structs.replace(answer, others_delay_ns=0)

    def curve(self, horizon_ns: int, points: int = 16) -> LoadForecast:
        """Says how loaded the instance will be if no other request comes. Needs a snapshot.

        Args:
            horizon_ns: From now to the last moment.
            points: Evenly spaced moments, now and the last one included.

        Raises:
            ValueError: fewer than 2 points, far too many, or a horizon below 0.
        """
        state = self._known()
        if self._native is None:
            return curve(state, horizon_ns, points)
        blocks_total = counting(self.parameters, state.snapshot).blocks_total
        return self._native.curve(horizon_ns, points, now_ns=self._now_ns, blocks_total=blocks_total)

    def leave(self, sequence: str) -> LeaveForecast | None:
        """Says what the others gain if a sequence goes at the end of the step under way. Needs a snapshot.

        Returns: None where the snapshot does not show it, or it has ended before now.
        """
        state = self._known()
        if self._native is None:
            return leave(state, sequence)
        for position, status in enumerate((*state.snapshot.running, *state.snapshot.waiting)):
            if status.sequence == sequence:
                return self._native.leave(status, position, now_ns=self._now_ns)
        return None

    def join(self, candidate: Candidate, *, at_ns: int | None = None) -> JoinForecast:
        """Says what the others lose if a sequence comes with its KV, all but its last token. Needs a snapshot.

        Args:
            candidate: One sequence; ``candidate.refusal(parameters)`` must be None. ``cached_tokens`` has no effect.
            at_ns: When its KV could be there at the earliest, unix ns; None for now.
        """
        comes_ns = self._now_ns if at_ns is None else max(at_ns, self._now_ns)
        state = self._known()
        if self._native is None:
            return join(state, candidate, at_ns=comes_ns)
        return self._native.join(candidate, now_ns=self._now_ns, at_ns=comes_ns)

    def _known(self) -> ForecastInput:
        assert self._snapshot is not None, "no snapshot was loaded"
        return ForecastInput(
            snapshot=self._snapshot,
            cost=self._scaled,
            parameters=self.parameters,
            lengths=self._lengths,
            now_ns=self._now_ns,
            pending=list(self._placements.values()),
            cached=self._cached,
        )
