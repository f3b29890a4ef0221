"""A modelled engine that runs by itself, on a clock of the test's and inside the simulator."""

from collections.abc import Callable
from typing import Any

import pytest
from millrace.actor.engine import EngineEvent, EngineSequence, EngineStepped
from millrace.contracts.worker import Sampling
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.pacing import LAG_NS_MAX, PacedEngine
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime

STEP_NS = 10_000_000


class ManualClock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.time_ns = 1_000_000_000
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def now_ns(self) -> int:
        return self.time_ns

    def at(self, time_ns: int, callback: Callable[[], None]) -> None:
        self._count += 1
        self._events.append((max(time_ns, self.time_ns), self._count, callback))

    def advance(self, duration_ns: int, late_ns: int = 0) -> None:
        """Runs what is due within ``duration_ns``, each event late by ``late_ns``."""
        until = self.time_ns + duration_ns
        while self._events and min(self._events)[0] + late_ns <= until:
            event = min(self._events)
            self._events.remove(event)
            self.time_ns = max(self.time_ns, event[0] + late_ns)
            event[2]()
        self.time_ns = until


def model() -> ModelledEngine:
    return ModelledEngine(EngineParameters(max_sequences=4, token_budget=64), LinearStepTime(fixed=STEP_NS))


def sequence(name: str, output: int = 5) -> EngineSequence:
    return EngineSequence(
        sequence=name, prompt_token_ids=[97, 98], sampling=Sampling(max_tokens=output, ignore_eos=True)
    )


class Bench:
    """A paced engine, its clock, what it said and when."""

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock()
        self.heard: list[tuple[int, EngineEvent]] = []
        self.begin_ns = self.clock.now_ns()
        self.paced = PacedEngine(model(), self.clock, self._hear, **options)

    def _hear(self, event: EngineEvent) -> None:
        self.heard.append((self.clock.now_ns() - self.begin_ns, event))

    def steps(self) -> list[int]:
        return [at for at, event in self.heard if isinstance(event, EngineStepped)]


def test_what_one_turn_adds_shares_the_first_step() -> None:
    bench = Bench()
    for name in "abc":
        bench.paced.add(sequence(name))
    bench.clock.advance(STEP_NS)
    (_, stepped) = bench.heard[-1]
    assert [output.sequence for output in stepped.outputs] == ["a", "b", "c"]


@pytest.mark.parametrize(("speed", "distance_ns"), [(1.0, STEP_NS), (4.0, STEP_NS // 4), (0, 0)])
def test_steps_follow_at_the_modelled_distance_though_timers_are_late(speed: float, distance_ns: int) -> None:
    bench = Bench(speed=speed)
    bench.paced.add(sequence("a"))
    late_ns = distance_ns // 3
    bench.clock.advance(10 * STEP_NS, late_ns)
    # The first event is late itself: time counts from when the sequence was added.
    assert bench.steps() == [distance_ns * (index + 1) + late_ns for index in range(5)]


def test_after_a_long_hold_up_it_does_not_catch_up() -> None:
    bench = Bench()
    bench.paced.add(sequence("a", output=100))
    bench.clock.advance(2 * STEP_NS)
    bench.clock.time_ns += 5 * LAG_NS_MAX
    bench.clock.advance(STEP_NS)
    held_up = bench.steps()[2:]
    assert len(held_up) == 2  # the one that was due, and one a step later


def test_snapshots_keep_their_distance_and_the_last_word_before_a_rest_has_one() -> None:
    bench = Bench(snapshot_interval_ns=3 * STEP_NS)
    bench.paced.add(sequence("a", output=8))
    bench.clock.advance(20 * STEP_NS)
    steps = [event for _, event in bench.heard if isinstance(event, EngineStepped)]
    assert [step.snapshot is not None for step in steps] == [True, False, False, True, False, False, True, True]
    assert steps[-1].snapshot.blocks_free == steps[-1].snapshot.blocks_total


def test_a_stalled_engine_is_silent_for_that_long_and_then_goes_on() -> None:
    bench = Bench()
    bench.paced.add(sequence("a", output=3))
    bench.clock.advance(STEP_NS)
    bench.paced.stall(7 * STEP_NS)
    bench.clock.advance(30 * STEP_NS)
    assert bench.steps()[:2] == [STEP_NS, 8 * STEP_NS]
    assert len(bench.steps()) == 3


def test_a_bound_ends_a_run_of_decode_steps_with_the_step_under_way() -> None:
    ends = []
    for bound in (0, 5):
        clock = ManualClock()
        parameters = EngineParameters(max_sequences=4, token_budget=64)
        engine = ModelledEngine(parameters, LinearStepTime(fixed=STEP_NS), tell_interval_ns=STEP_NS)
        paced = PacedEngine(engine, clock, lambda event: None, run_ns_max=10 * STEP_NS)
        paced.add(sequence("a", output=8))
        clock.advance(3 * STEP_NS + 1)
        if bound:
            paced.limit_step(bound)
        clock.advance(20 * STEP_NS)
        ends.append((engine.steps, engine.output_tokens, engine.scheduler.token_budget))
    assert ends == [(8, 8, 64), (8, 8, 5)]
