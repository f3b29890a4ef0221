"""A modelled engine that runs by itself: its pace, and runs of decode steps at once, the same as one by one."""

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

import pytest
from millrace.actor.engine import EngineEvent, EngineSequence, EngineStepped
from millrace.contracts.status import BatchComposition
from millrace.contracts.worker import Sampling
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.pacing import LAG_NS_MAX, PacedEngine
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.runs import DecodeRun
from millrace.enginemodel.scripted import ScriptedEngine
from millrace.enginemodel.step_cost import CostCurve, StepCost
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.enginemodel.tokens import OutputLengths

MILLISECOND = 1_000_000


class Queue:
    """A clock that jumps from event to event; what was asked for first comes first at equal times."""

    def __init__(self, time_ns: int = 0) -> None:
        self.time_ns = time_ns
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def now_ns(self) -> int:
        return self.time_ns

    def at(self, time_ns: int, callback: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._heap, (max(time_ns, self.time_ns), self._count, callback))

    def run(self) -> None:
        while self._heap:
            self.time_ns, _count, callback = heappop(self._heap)
            callback()


def state(engine: ModelledEngine) -> dict[str, Any]:
    scheduler = engine.scheduler
    last = engine.snapshot(0)
    running: list[Any] = list(scheduler.running)
    return {
        "running": [(s.sequence, s.total, s.computed, s.blocks, s.slots, s.named_blocks) for s in running],
        "tokens": [list(s.token_ids) for s in running],
        "waiting": [(s.sequence, s.total, s.preemptions) for s in scheduler.waiting],
        "free": scheduler.pool.free_order(),
        "preemptions": scheduler.preemptions,
        "last": (last.batch, last.step_duration_ns),
    }


class Rig:
    """An engine that runs through a plan of additions and cancellations; keeps what it said and how it stood."""

    def __init__(self, engine: ModelledEngine, plan: list[tuple[int, Any]], **options: Any) -> None:
        self.queue = Queue()
        self.engine = engine
        self.states: dict[int, tuple[int, dict[str, Any]]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.first_ns: dict[str, int] = {}
        self.ended: dict[str, tuple[int, str]] = {}
        self.messages = 0
        paced = PacedEngine(engine, self.queue, self._hear, **options)
        for at_ns, what in plan:
            if isinstance(what, EngineSequence):
                self.queue.at(at_ns, lambda sequence=what: paced.add(sequence))
            elif isinstance(what, int):
                self.queue.at(at_ns, lambda duration_ns=what: paced.stall(duration_ns))
            else:
                self.queue.at(at_ns, lambda name=what: paced.cancel([name]))
        self.queue.run()

    def _hear(self, event: EngineEvent) -> None:
        if not isinstance(event, EngineStepped):
            return
        self.messages += 1
        self.states[event.step] = (event.at_ns, state(self.engine))
        self.engine.check_invariants()
        for output in event.outputs:
            self.tokens.setdefault(output.sequence, []).extend(output.token_ids)
            self.first_ns.setdefault(output.sequence, event.at_ns)
            if output.finish is not None:
                self.ended[output.sequence] = (event.at_ns, output.finish.value)


def draw(rng: Random) -> tuple[EngineParameters, LinearStepTime, list[tuple[int, Any]]]:
    """Parameters, step times and a plan: from idle engines to full queues and preemptions."""
    block_size = rng.choice((4, 16))
    parameters = EngineParameters(
        max_model_len=160,
        block_size=block_size,
        blocks_total=rng.choice((160, 240, 800)) // block_size,
        max_sequences=rng.choice((2, 5, 40)),
        token_budget=rng.choice((8, 40, 256)),
        long_prefill_token_threshold=rng.choice((0, 16)),
        prefix_caching=rng.random() < 0.5,
        watermark=rng.choice((0.0, 0.05)),
        reserve_full_prompt=rng.random() < 0.5,
    )
    step_time = LinearStepTime(
        fixed=rng.uniform(1e6, 9e6),
        per_decode=rng.uniform(0, 3e5),
        per_prefill_token=rng.uniform(0, 3e4),
        per_context_token=rng.choice((0.0, 777.7)),
        per_tail_token=rng.choice((0.0, 0.0, 20_000.1)),
        tail_decodes=rng.choice((0, 3)),
        per_mixed_context_token=rng.choice((0.0, 333.3)),
        per_prompted_step=rng.choice((0.0, 1.25e6)),
    )
    gap_ns = rng.choice((2, 15, 120)) * MILLISECOND
    plan: list[tuple[int, Any]] = []
    at_ns = 0
    for number in range(rng.randrange(1, 40)):
        at_ns += int(rng.expovariate(1 / gap_ns))
        prompt = [rng.choice((7, 8))] * rng.randrange(1, 60)
        sampling = Sampling(
            max_tokens=rng.choice((1, 3, 40, 400)),
            stop_token_ids=[101] if rng.random() < 0.1 else [],
            logprobs=1 if rng.random() < 0.05 else None,
        )
        output = [9] * rng.randrange(sampling.max_tokens) if rng.random() < 0.1 else []
        sequence = EngineSequence(
            sequence=f"s{number}",
            prompt_token_ids=prompt,
            output_token_ids=output[:60],
            sampling=sampling,
            arrival_ns=at_ns,
        )
        plan.append((at_ns, sequence))
        if rng.random() < 0.15:
            plan.append((at_ns + int(rng.expovariate(1 / (200 * MILLISECOND))), f"s{rng.randrange(number + 1)}"))
        if rng.random() < 0.03:
            plan.append((at_ns, rng.randrange(50 * MILLISECOND)))
    return parameters, step_time, sorted(plan, key=lambda entry: entry[0])


@pytest.mark.parametrize("seed", range(40))
def test_runs_give_the_steps_times_blocks_and_tokens_of_single_steps(seed: int) -> None:
    parameters, step_time, plan = draw(Random(seed))
    lengths = OutputLengths(mean=30, sigma=0.9)
    single = Rig(ModelledEngine(parameters, step_time, lengths=lengths), plan)
    interval_ns = Random(seed).choice((0, 30, 500)) * MILLISECOND
    engine = ModelledEngine(parameters, step_time, lengths=lengths, tell_interval_ns=interval_ns)
    together = Rig(engine, plan, run_ns_max=1000 * MILLISECOND, snapshot_interval_ns=250 * MILLISECOND)

    assert together.engine.steps == single.engine.steps
    assert together.ended == single.ended
    assert together.first_ns == single.first_ns
    finished = set(single.ended)
    assert {n: t for n, t in together.tokens.items() if n in finished} == {
        n: t for n, t in single.tokens.items() if n in finished
    }
    assert together.states
    for step, (at_ns, stood) in together.states.items():
        assert (at_ns, stood) == single.states[step]


def test_the_step_under_way_is_the_one_that_has_not_ended() -> None:
    cost = StepCost(fixed=2 * 10**12 + 1, context_token=10**9)
    run = DecodeRun(cost, BatchComposition(decodes=3, context_tokens=100), begins_ns=5, remainder_fs=999_999)
    run.limit(400, 10**12)
    for number in (1, 2, 77, run.steps):
        assert run.under_way(run.ends_ns(number)) == number
        assert run.under_way(run.ends_ns(number) - 1) == number
    assert run.under_way(run.ends_ns(3) + 1) == 4


@pytest.mark.parametrize(
    "cost",
    [
        StepCost(fixed=10**12, decode=7, context_token=12_345_678),
        StepCost(fixed=10**12, context_token=10**8, tail_token=10**9),
        StepCost(fixed=10**12, tokens=CostCurve((0, 4), (5, 9), (1, 2)), sequences=CostCurve((0,), (3,), (4,))),
        StepCost(fixed=10**12, decode_context=(CostCurve((0, 900), (0, 10**9), (10**6, 10**7)),)),
        StepCost(fixed=3, context_token=0),
    ],
)
def test_a_runs_time_is_the_sum_of_its_steps(cost: StepCost) -> None:
    first = BatchComposition(decodes=5, context_tokens=800, longest_context=300)
    run = DecodeRun(cost, first, begins_ns=0, remainder_fs=17)
    for steps in (1, 2, 50):
        assert run.elapsed_fs(steps) == 17 + cost.decode_run_fs(first, steps)


def test_a_scripted_sequence_ends_where_its_script_or_its_bounds_say() -> None:
    lengths = {"a": 3, "b": 50, "c": 500}
    parameters = EngineParameters(max_model_len=100)
    engine = ScriptedEngine(parameters, LinearStepTime(fixed=1e6), output_length=lengths.__getitem__)
    plan = [
        (0, EngineSequence(sequence=name, prompt_token_ids=[5] * 10, sampling=Sampling(max_tokens=bound)))
        for name, bound in (("a", 90), ("b", 20), ("c", 400))
    ]
    rig = Rig(engine, list(plan))
    assert {name: (len(rig.tokens[name]), finish) for name, (_at, finish) in rig.ended.items()} == {
        "a": (3, "stop"),
        "b": (20, "length"),
        "c": (90, "length"),
    }


# Pace: on a clock of the test's.


STEP_NS = 10_000_000


class ManualClock(Queue):
    """Moves only when told to."""

    def advance(self, duration_ns: int, late_ns: int = 0) -> None:
        """Runs what is due within ``duration_ns``, each event late by ``late_ns``."""
        until = self.time_ns + duration_ns
        while self._heap and self._heap[0][0] + late_ns <= until:
            due_ns, _count, callback = heappop(self._heap)
            self.time_ns = max(self.time_ns, due_ns + late_ns)
            callback()
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
        self.clock = ManualClock(1_000_000_000)
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
