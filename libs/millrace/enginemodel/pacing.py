"""Drives a modelled engine through time: one pending event per engine, on whatever clock it is given.

The live worker gives the wall clock (services/worker/modelled.py), the simulator virtual time (sim/engine_sim.py);
everything else about pacing is here, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from millrace.actor.engine import (
    EngineEvent,
    EngineFailed,
    EngineObserved,
    EngineSequence,
    EngineStepped,
    KvCommand,
    SequenceAdded,
    SequenceRejected,
)
from millrace.enginemodel.arrivals import ModelledReservation
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.network import Clock, KvNetwork
from millrace.enginemodel.transfers import Transfers

#: A driver that was held up for longer than this does not catch up: a burst of steps would be no engine's behaviour.
LAG_NS_MAX = 100_000_000


class PacedEngine:
    """A modelled engine that runs by itself.

    Steps follow each other at their modelled distance: an event that comes late does not stretch the next step, so
    that throughput is the model's as long as the clock keeps up.
    """

    def __init__(
        self,
        engine: ModelledEngine,
        clock: Clock,
        tell: Callable[[EngineEvent], None],
        *,
        speed: float = 1.0,
        snapshot_interval_ns: int = 0,
        run_ns_max: int = 0,
    ) -> None:
        """Builds it at rest.

        Args:
            tell: Hears everything the engine says, never within a call of ``add`` or ``cancel``.
            speed: How much faster than modelled time passes; 0 for steps without duration.
            snapshot_interval_ns: Least time between two snapshots while it runs; 0 for one with every step.
            run_ns_max: Longest run of decode steps that is computed at once, up to the next snapshot; 0 for step by
                step. Only at speed 1. Changes when tokens are reported, and no step.
        """
        assert speed == 1.0 or not run_ns_max, "runs are for modelled time as it is"
        self._run_ns_max = run_ns_max
        self._round = 0  # of the event under way; one of an earlier round was overtaken by a cut
        self.engine = engine
        self._clock = clock
        self._tell = tell
        self._speed = speed
        self._interval_ns = snapshot_interval_ns
        self._due_ns = 0  # when the step under way ends
        self._observed_ns = 0
        self._stepping = False
        self._observing = False
        self._ended = False
        self._stalled_until_ns = 0
        self._transfers = Transfers(engine, clock, self._say_of_transfer)

    def connect(self, network: KvNetwork) -> None:
        """Gives it what carries other engines' KV here; without, it moves nothing."""
        self._transfers.network = network

    def add(self, sequence: EngineSequence) -> None:
        self._cut()
        name, tokens = sequence.sequence, 0
        room = self._room_for(sequence)
        if room is not None and room.replica:
            refusal, tokens = self._transfers.resume(sequence)
        elif room is not None:
            refusal = self._transfers.receive(sequence, self._arrived)
            if refusal is None:
                return
        else:
            refusal = self.engine.add(sequence)
        added = SequenceAdded(sequence=name, kv_tokens=tokens)
        answer = added if refusal is None else SequenceRejected(sequence=name, detail=refusal)
        self._soon(lambda: self._say(answer))
        self._wake()

    def _room_for(self, sequence: EngineSequence) -> ModelledReservation | None:
        handover = sequence.handover
        return self.engine.moves.arrivals.get(handover.migration) if handover is not None else None

    def _arrived(self, source: EngineSequence) -> None:
        """Its last blocks are here: whoever hears SequenceAdded may let the source go."""
        if self._ended:
            return
        self._cut()
        tokens = self.engine.moves.arrive(source)
        self._say(SequenceAdded(sequence=source.sequence, kv_tokens=tokens))
        self._wake()

    def cancel(self, sequences: list[str]) -> None:
        """Cancels sequences; their blocks are free at once."""
        self._cut()
        self._transfers.cancelled(sequences)
        if self.engine.cancel(sequences):
            self._look()
        self._wake()

    def move(self, command: KvCommand) -> None:
        self._cut()
        free = self.engine.scheduler.pool.free
        answers = self._transfers.carry_out(command)
        if answers:
            self._soon(partial(self._say_all, answers))
        if self.engine.scheduler.pool.free != free:
            self._look()
        self._wake()

    def limit_step(self, tokens: int) -> None:
        self._cut()
        self.engine.limit_step(tokens)
        self._look()

    def _look(self) -> None:
        """Blocks were taken or freed between steps: an idle engine says so."""
        if not self._observing:
            self._observing = True
            self._soon(self._observe)

    def _wake(self) -> None:
        """Begins to step where there is something to compute now; with the next turn, so that what else this turn
        adds joins the first step.
        """
        if not self._stepping and self.engine.scheduler.has_work():
            self._stepping = True
            self._due_ns = self._clock.now_ns()
            self._soon(self._begin)

    def _say_of_transfer(self, event: EngineEvent) -> None:
        self._say(event)
        self._wake()

    def stop(self) -> None:
        """Says nothing any more. Idempotent."""
        self._ended = True

    def fail(self, detail: str) -> None:
        """Dies as a real engine might: EngineFailed is its last word."""
        if not self._ended:
            self._ended = True
            self._clock.at(0, lambda: self._tell(EngineFailed(detail=detail)))

    def stall(self, duration_ns: int) -> None:
        """Hangs for a while: no step ends before that time has passed."""
        self._cut()
        self._stalled_until_ns = self._clock.now_ns() + duration_ns

    def _soon(self, callback: Callable[[], None]) -> None:
        self._clock.at(0, callback)

    def _say(self, event: EngineEvent) -> None:
        if not self._ended:
            self._tell(event)

    def _say_all(self, events: list[EngineEvent]) -> None:
        for event in events:
            self._say(event)

    def _observe(self) -> None:
        """After a cancel: a running engine's next step tells, an idle one has to be looked at."""
        self._observing = False
        if not self._stepping:
            self._say(EngineObserved(snapshot=self.engine.snapshot(self._clock.now_ns())))

    def _begin(self) -> None:
        """Starts a step, or rests where there is nothing to compute."""
        if self._ended:
            return
        now_ns = self._clock.now_ns()
        if now_ns - self._due_ns > LAG_NS_MAX:
            self._due_ns = now_ns
        span_ns = self._span_ns() if self._run_ns_max else 0
        duration_ns = self.engine.begin_step(self._due_ns, span_ns)
        if duration_ns is None:
            self._stepping = False
        elif self._speed == 0:
            self._soon(partial(self._complete, self._round))
        else:
            self._due_ns += duration_ns if self._speed == 1 else round(duration_ns / self._speed)
            self._clock.at(self._due_ns, partial(self._complete, self._round))

    def _span_ns(self) -> int:
        """Return the longest time that a run may take, ns: until a snapshot is due."""
        until_snapshot_ns = self._observed_ns + self._interval_ns - self._due_ns
        return max(1, min(self._run_ns_max, until_snapshot_ns))

    def _cut(self) -> None:
        """Something changes: a run ends with the step under way."""
        ends_ns = self.engine.interrupt(self._clock.now_ns())
        if ends_ns is not None and ends_ns != self._due_ns:
            self._due_ns = ends_ns
            self._round += 1
            self._clock.at(ends_ns, partial(self._complete, self._round))

    def _complete(self, round_number: int) -> None:
        if self._ended or round_number != self._round:
            return
        at_ns = self._clock.now_ns()
        if at_ns < self._stalled_until_ns:
            self._clock.at(self._stalled_until_ns, partial(self._complete, round_number))
            return
        stepped = self._stepped(at_ns)
        if stepped.outputs or stepped.snapshot is not None or not self._run_ns_max:
            self._say(stepped)
        self._say_all(self._transfers.settled(at_ns))
        self._begin()

    def _stepped(self, at_ns: int) -> EngineStepped:
        stepped = self.engine.complete_step(at_ns, with_snapshot=at_ns - self._observed_ns >= self._interval_ns)
        if stepped.snapshot is None and not self.engine.scheduler.has_work():
            # The last word before a rest: no later output would report that all blocks are free.
            stepped = msgspec.structs.replace(stepped, snapshot=self.engine.snapshot(at_ns))
        if stepped.snapshot is not None:
            self._observed_ns = at_ns
        return stepped
